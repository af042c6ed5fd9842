"""examples/pretrain_gpt.py that also writes down what test_cases.py wants to know. ::

    observed_gpt.py --observe STEM [--uneven-masks] <flags of examples/pretrain_gpt.py>

``STEM.rank<r>.json`` receives, for this rank's training:

==================  ============================================================================
``losses``          Of every microbatch: sum over its tokens, and their number (last stage).
``gradients``       A hash of all gradients before every optimizer step.
``step_skipped``    What every ``train_step`` said of skipped updates.
``samples``         Index of every training sample, in the order of reading.
``drains``          State after every evaluation and at every checkpoint.
``groups``          Ranks of every process group made before the first iteration, in order.
``late_groups``     Those made within an iteration.
``first_marks``     Version at every forward that is marked as the first of its version.
``reductions``      Version at every start of a gradient reduction; ``buckets`` is their number.
``handles``         How many sends and receives were posted, and how many were waited for.
==================  ============================================================================
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from unittest import mock

import torch
from megatron.core.datasets.utils import Split
from megatron.training import get_args

from examples import pretrain_gpt
from megatron_paci.build import installed_stage
from megatron_paci.channel import Link
from megatron_paci.patching import Patch, PatchSet
from megatron_paci.tied import tied_parameter
from tests.gloo.probes import digest

forward_step, loss_over_tokens = pretrain_gpt.forward_step, pretrain_gpt.loss_over_tokens


class CountedRequest:
    """A handle of a send or a receive that counts the first wait for it."""

    def __init__(self, request, counts: dict[str, int]):
        self._request, self._counts, self._waited = request, counts, False
        counts["posted"] += 1

    def wait(self) -> None:
        self._request.wait()
        self._counts["waited"] += not self._waited
        self._waited = True

    def is_completed(self) -> bool:
        return self._request.is_completed()


class Observer:
    """The wrappers, and what they have seen."""

    def __init__(self):
        self.seen: dict = {
            name: [] for name in (
                "losses", "gradients", "step_skipped", "samples", "drains", "groups",
                "late_groups", "first_marks", "reductions",
            )
        }
        self.seen |= {"handles": {"posted": 0, "waited": 0}, "buckets": 0}
        self._model = None
        self._in_step = False

    def patches(self) -> PatchSet:
        training = "megatron.training.training"
        buckets = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
        wrappers = {
            f"{training}:train": self.train,
            f"{training}:train_step": self.train_step,
            f"{training}:evaluate": self.evaluate,
            "megatron.training.checkpointing:save_checkpoint": self.save_checkpoint,
            "megatron.core.datasets.gpt_dataset:GPTDataset.__getitem__": self.read_sample,
            "torch.distributed.distributed_c10d:new_group": self.new_group,
            "megatron.core.transformer.module:MegatronModule.set_is_first_microbatch":
                self.mark_first,
            f"{buckets}.start_grad_sync": self.start_reduction,
            f"{Link.__module__}:_post_send": self.post_send,
            f"{Link.__module__}:_post_receive": self.post_receive,
        }
        return PatchSet([Patch(target, each, (), "observes") for target, each in wrappers.items()])

    def loss(self, loss_mask, losses):
        result = loss_over_tokens(loss_mask, losses)
        if torch.is_grad_enabled():  # not in evaluation
            self.seen["losses"].append(result[2]["lm loss"].tolist())
        return result

    def train(self, original, *args, **kwargs):
        self._model, optimizer = args[1][0], args[2]
        self.seen["buckets"] = len(self._model.bucket_groups)
        step = optimizer.step_with_ready_grads

        def observed_step(*step_args, **step_kwargs):
            gradients = (parameter.main_grad for parameter in self._model.parameters())
            self.seen["gradients"].append(digest(gradients))
            return step(*step_args, **step_kwargs)

        optimizer.step_with_ready_grads = observed_step
        return original(*args, **kwargs)

    def train_step(self, original, *args, **kwargs):
        self._in_step = True
        result = original(*args, **kwargs)
        self._in_step = False
        self.seen["step_skipped"].append(result[1])
        return result

    def evaluate(self, original, *args, **kwargs):
        result = original(*args, **kwargs)
        self.note_drain("evaluate")
        return result

    def save_checkpoint(self, original, *args, **kwargs):
        self.note_drain("save")
        return original(*args, **kwargs)

    def note_drain(self, why: str) -> None:
        stage = installed_stage()
        model = self._model
        tracker = Path(get_args().save or "") / "latest_checkpointed_iteration.txt"
        tied = None if model is None else tied_parameter(model)
        self.seen["drains"].append(
            {
                "why": why,
                "iterations": len(self.seen["step_skipped"]),
                "consumed": get_args().consumed_train_samples,
                "counts": stage and [
                    stage.engine.num_forwards, stage.engine.num_backwards, stage.engine.version
                ],
                "tied": None if tied is None else digest([tied]),
                "tracked": int(tracker.read_text()) if tracker.exists() else None,
            }
        )

    def read_sample(self, original, dataset, index):
        if dataset.index_split is Split.train:
            self.seen["samples"].append(int(index))
        return original(dataset, index)

    def new_group(self, original, *args, **kwargs):
        ranks = kwargs.get("ranks", args[0] if args else None)
        if self._in_step:
            self.seen["late_groups"].append(ranks)
        elif not kwargs.get("use_local_synchronization"):  # no other rank takes part in those
            self.seen["groups"].append(ranks and list(ranks))
        return original(*args, **kwargs)

    def mark_first(self, original, module):
        if self._in_step:
            self.seen["first_marks"].append(version())
        return original(module)

    def start_reduction(self, original, *args, **kwargs):
        self.seen["reductions"].append(version())
        return original(*args, **kwargs)

    def post_send(self, original, *args, **kwargs):
        return CountedRequest(original(*args, **kwargs), self.seen["handles"])

    def post_receive(self, original, *args, **kwargs):
        request, tensor = original(*args, **kwargs)
        return CountedRequest(request, self.seen["handles"]), tensor


def version() -> int | None:
    """Return the version of this rank's stage, None under Megatron's own schedules."""
    stage = installed_stage()
    return stage and stage.engine.version


def unevenly_masked(data_iterator):
    """Yield samples whose loss leaves out up to three quarters of the tokens."""
    while True:
        item = next(data_iterator)
        length = item["tokens"].shape[1]
        for tokens, mask in zip(item["tokens"], item["loss_mask"]):
            # Mock samples count up, so their first token says it all.
            mask[: 7 * int(tokens[0]) % (3 * length // 4)] = 0
        yield item


def masked_forward_step(data_iterator, model):
    return forward_step(data_iterator and unevenly_masked(data_iterator), model)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--observe", required=True)
    parser.add_argument("--uneven-masks", action="store_true")
    options, sys.argv[1:] = parser.parse_known_args()
    observer = Observer()
    patches = observer.patches()
    step = masked_forward_step if options.uneven_masks else forward_step
    with (
        mock.patch.object(pretrain_gpt, "forward_step", step),
        mock.patch.object(pretrain_gpt, "loss_over_tokens", observer.loss),
    ):
        patches.install()
        try:
            pretrain_gpt.main()
        finally:  # Megatron also leaves training by SystemExit
            patches.uninstall()
            path = Path(f"{options.observe}.rank{os.environ['RANK']}.json")
            path.write_text(json.dumps(observer.seen))


if __name__ == "__main__":
    main()
