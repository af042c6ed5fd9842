"""A launch script for benchmarks: a GPT on random tokens, with megatron.training and its flags.

What it trains is of no interest, only in which order passes and messages follow one another. So it
reads no files, and builds nothing that costs time.
"""

from __future__ import annotations

import torch
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.arguments import parse_and_validate_args

from megatron_paci.gpt import pretrain_arguments


class RandomTokens(torch.utils.data.Dataset):
    """Sequences of random tokens; a sample depends on its index alone."""

    def __init__(self, num_samples: int, *, sequence_length: int, vocab_size: int):
        self._num_samples = num_samples
        self._sequence_length = sequence_length
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return ``sequence_length + 1`` tokens: inputs, and labels one later."""
        generator = torch.Generator().manual_seed(int(index))
        return torch.randint(
            self._vocab_size, (self._sequence_length + 1,), generator=generator
        )


def datasets(num_samples: list[int], vp_stage: int | None = None):
    """Build the training set; there is no evaluation."""
    args = get_args()
    training = RandomTokens(
        num_samples[0], sequence_length=args.seq_length, vocab_size=args.vocab_size
    )
    return training, None, None


datasets.is_distributed = True  # every rank reads its own data, so none has to be sent


def forward_step(data_iterator, model):
    """Run one microbatch through this rank's model chunk; see ``loss``."""
    tokens = next(data_iterator).cuda()
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    return model(inputs, positions, None, labels=labels), loss


def loss(losses: torch.Tensor):
    """Return the summed loss, the number of tokens, and both for the log."""
    total = losses.float().sum()
    num_tokens = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    return total, num_tokens, {"lm loss": torch.stack([total.detach(), num_tokens.float()])}


def embedding_ranks(pipeline_ranks: list[int]) -> list[int]:
    """Return the ranks that hold word embeddings: the last one only if they are tied."""
    first, last = pipeline_ranks[0], pipeline_ranks[-1]
    return [first] if get_args().untie_embeddings_and_output_weights else sorted({first, last})


def main() -> None:
    """Parse the flags and train."""
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    pretrain(
        **pretrain_arguments(args),
        train_valid_test_dataset_provider=datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        get_embedding_ranks=embedding_ranks,
    )


if __name__ == "__main__":
    main()
