"""examples/pretrain_gpt.py with small validation sets whose samples are the same in every run. ::

    validated_gpt.py [--first-sample K] <flags of examples/pretrain_gpt.py>

The first evaluation of a run begins at sample ``K``. With ``--multiple-validation-sets`` there are
two. Megatron's own sets depend on the length of the run.
"""

from __future__ import annotations

import argparse
import sys
from unittest import mock

from megatron.core.datasets.utils import Split
from megatron.training import get_args
from torch.utils.data import Subset

from examples import pretrain_gpt

build = pretrain_gpt.datasets


class Part(Subset):
    """Some samples of a validation set; Megatron samples by the kind of set."""

    index_split = Split.valid


def datasets(num_samples: list[int], vp_stage: int | None = None, *, first: int = 0):
    training, validation, test = build([num_samples[0], 400, 16], vp_stage)
    if validation is None:  # this stage reads no data
        parts = [None, None]
    elif get_args().full_validation:
        parts = [Part(validation, range(8)), Part(validation, range(8, 12))]
    else:
        parts = [Part(validation, range(first, 400))]
    if get_args().multiple_validation_sets:
        return training, parts, None  # Megatron takes the test set for a list, too
    return training, parts[0], test


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--first-sample", type=int, default=0)
    options, sys.argv[1:] = parser.parse_known_args()

    def provider(num_samples, vp_stage=None):
        return datasets(num_samples, vp_stage, first=options.first_sample)

    provider.is_distributed = True
    with mock.patch.object(pretrain_gpt, "datasets", provider):
        pretrain_gpt.main()


if __name__ == "__main__":
    main()
