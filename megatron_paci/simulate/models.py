"""How long a stage of a transformer computes and what it holds, from the shape of the model.

Activations follow Korthikanti et al. (arXiv 2205.05198, section 4), as Megatron's own report of
theoretical memory does: a layer of a GPT keeps ``s b h (34 + 5 a s / h)`` bytes in 16 bits, the
second term only where attention keeps its scores, which flash attention does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, kw_only=True)
class Model:
    """The shape of a decoder-only transformer."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    """Tokens per sample."""
    vocabulary: int
    ffn: int
    """Hidden size of the MLP."""
    query_groups: int
    """Key and value heads."""
    gated: bool = False
    """Whether the MLP multiplies two projections, as SwiGLU does."""
    learned_positions: bool = False
    tied: bool = True
    """Whether the output layer uses the weights of the word embedding."""

    @property
    def layer_parameters(self) -> int:
        """Weights of a layer's matrices; norms and biases, below one part in a thousand, are not
        counted."""
        shared = Fraction(self.query_groups, self.heads)
        attention = 2 * self.hidden**2 * (1 + shared)
        return int(attention) + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def padded_vocabulary(self) -> int:
        """The vocabulary as Megatron pads it by default, to a multiple of 128."""
        return -(-self.vocabulary // 128) * 128

    @property
    def embedding_parameters(self) -> int:
        """Weights of the word embedding, or of the output layer."""
        return self.padded_vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All weights of the model."""
        return self.stage_parameters(self.layers, first=True, last=True)

    def operations(self, layers: int, *, last: bool) -> tuple[int, int, int]:
        """Return multiplications per token of a forward, and of the gradients of input and weights.

        A causal attention kernel skips the half of the scores that is masked. Attention scores have
        no weights, so their backward, twice the forward, belongs to the input's gradient.

        Args:
            layers: Of the stage.
            last: Whether it has the output layer.
        """
        matrices = layers * self.layer_parameters + last * self.embedding_parameters
        scores = layers * self.sequence * self.hidden
        return matrices + scores, matrices + 2 * scores, matrices

    def stage_parameters(self, layers: int, *, first: bool, last: bool) -> int:
        """Return the weights on a stage; the last one has its own copy of tied embeddings."""
        embeddings = 1 if self.tied and first and last else first + last
        positions = self.sequence * self.hidden if first and self.learned_positions else 0
        matrices = layers * self.layer_parameters + embeddings * self.embedding_parameters
        return matrices + positions

    def layer_activations(self, *, width: int, keep_scores: bool) -> int:
        """Return the bytes per sample that a layer keeps for its backward.

        Args:
            width: Bytes of a number.
            keep_scores: Whether attention keeps its scores.
        """
        keys_and_values = Fraction(2 * self.query_groups, self.heads)
        numbers = self.hidden * (6 + keys_and_values) + (3 if self.gated else 2) * self.ffn
        masks = 2 * self.hidden  # a byte each, of dropout
        scores = (2 * width + 1) * self.heads * self.sequence if keep_scores else 0
        return int(self.sequence * (width * numbers + masks + scores))

    def edge_activations(self, *, first: bool, last: bool, width: int) -> tuple[int, int]:
        """Return the bytes per sample that the first stage keeps besides, and the last one.

        The first keeps tokens and a dropout mask per microbatch, the last one the input of its norm
        and of the output layer and fp32 logits.
        """
        return (
            first * self.sequence * (8 + self.hidden),
            last * self.sequence * (2 * width * self.hidden + 4 * self.padded_vocabulary),
        )


def _gpt2(layers: int, hidden: int, heads: int) -> Model:
    return Model(layers=layers, hidden=hidden, heads=heads, sequence=1024, vocabulary=50257,
                 ffn=4 * hidden, query_groups=heads, learned_positions=True)


def _llama(
    layers: int, hidden: int, heads: int, groups: int, ffn: int, sequence: int, vocabulary: int,
    *, tied: bool = False,
) -> Model:
    return Model(layers=layers, hidden=hidden, heads=heads, sequence=sequence, ffn=ffn,
                 vocabulary=vocabulary, query_groups=groups, gated=True, tied=tied)


MODELS = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama2-7b": _llama(32, 4096, 32, 32, 11008, 4096, 32000),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824, 4096, 32000),
    "llama-1b": _llama(16, 2048, 32, 8, 8192, 8192, 128256, tied=True),
    "llama-8b": _llama(32, 4096, 32, 8, 14336, 8192, 128256),
    "llama-70b": _llama(80, 8192, 64, 8, 28672, 8192, 128256),
}
"""Published shapes; ``llama-1b`` is Llama 3.2's, ``llama-8b`` and ``llama-70b`` Llama 3.1's."""


def balanced(model: Model, num_stages: int) -> list[int]:
    """Return layers per stage, at least 1, such that the slowest stage is as fast as can be."""
    layers = [1] * num_stages
    for _ in range(model.layers - num_stages):
        # Layers are alike, so giving each to the stage that is fastest with it is optimal; of equal
        # ones to the last, which has fewest microbatches in flight.
        fastest = min(
            reversed(range(num_stages)),
            key=lambda stage: sum(
                model.operations(layers[stage] + 1, last=stage == num_stages - 1)
            ),
        )
        layers[fastest] += 1
    return layers


def static_bytes(
    parameters: int, *, width: int, replicas: int, distributed_optimizer: bool
) -> dict[str, Fraction]:
    """Return the bytes of weights, fp32 gradients and Adam's state, as Megatron keeps them.

    16-bit weights need a fp32 copy in the optimizer; the distributed optimizer shares its state
    among the replicas.
    """
    optimizer = 12 if width == 2 else 8
    return {
        "weights": Fraction(width * parameters),
        "gradients": Fraction(4 * parameters),
        "optimizer": Fraction(optimizer * parameters, replicas if distributed_optimizer else 1),
    }


def stage_costs(
    model: Model, layers: Sequence[int]
) -> tuple[list[float], list[float], list[float]]:
    """Return the times of a forward and both gradients per stage.

    The unit is the forward of a stage with an equal share of the layers and nothing else.
    """
    unit = model.operations(model.layers, last=False)[0] / len(layers)
    costs = [
        model.operations(count, last=stage == len(layers) - 1) for stage, count in enumerate(layers)
    ]
    return tuple([value / unit for value in column] for column in zip(*costs))
