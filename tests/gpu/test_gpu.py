"""The GPU check (check.py), where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import check


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_paci_on_cuda(tmp_path, capsys):
    assert check.main(["--out", str(tmp_path)]) == 0, capsys.readouterr().out
