"""examples/pretrain_gpt.py with microbatches of different lengths.

Megatron has no flag for them, only a field of the model's configuration.
"""

from __future__ import annotations

from unittest import mock

from megatron.core.transformer.transformer_config import TransformerConfig

from examples import pretrain_gpt

lengths: set[int] = set()
post_init, forward_step = TransformerConfig.__post_init__, pretrain_gpt.forward_step


def variable_post_init(config):
    config.variable_seq_lengths = True
    post_init(config)


def shortened(data_iterator):
    """Yield each sample cut to a quarter, a half, three quarters or all of its length."""
    while True:
        item = next(data_iterator)
        quarter = item["tokens"].shape[1] // 4
        # Mock samples count up, so their first token says it all.
        length = quarter * (1 + int(item["tokens"][0, 0]) % 4)
        lengths.add(length)
        yield {name: values[:, :length].contiguous() for name, values in item.items()}


def variable_forward_step(data_iterator, model):
    return forward_step(data_iterator and shortened(data_iterator), model)


if __name__ == "__main__":
    # Undone: the process of a test runs this script several times.
    with (
        mock.patch.object(TransformerConfig, "__post_init__", variable_post_init),
        mock.patch.object(pretrain_gpt, "forward_step", variable_forward_step),
    ):
        pretrain_gpt.main()
    assert len(lengths) in (0, 4), lengths  # none on stages that read no data
