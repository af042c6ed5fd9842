"""megatron_paci.cpu.CpuDevice: what it answers, what it refuses, and that it leaves no trace."""

import gc
import logging
import os
import random
import sys
import types

import pytest

torch = pytest.importorskip("torch")
import torch._dynamo  # noqa: E402, F401, F811  (replaces torch.manual_seed when it is imported)
import torch.distributed  # noqa: E402
import torch.utils.data  # noqa: E402

from megatron_paci.cpu import CpuDevice  # noqa: E402
from megatron_paci.cpu import table as cpu_table  # noqa: E402
from megatron_paci.cpu.missing import CpuDeviceError  # noqa: E402

pytestmark = pytest.mark.skipif(
    torch.cuda.is_initialized(), reason="this process has used a GPU, which the CPU device refuses"
)

CLASSES = (
    torch.Tensor,
    torch._C.TensorBase,
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.Adam,
    torch.utils._device.DeviceContext,
    torch.utils.data.dataloader._BaseDataLoaderIter,
)

# As they are before any device: a trace left by the first one would be there before the second.
PRISTINE = {owner: dict(vars(owner)) for owner in (*CLASSES, torch, torch.cuda, torch.distributed)}


@pytest.fixture
def device():
    with CpuDevice() as installed:
        yield installed


@pytest.fixture(scope="module", autouse=True)
def settled():
    """Install once, so that what torch imports on first use is there before comparing."""
    with CpuDevice():
        pass


def world():
    """Everything the device could have changed: attribute to object, of modules and classes."""
    seen = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and name.split(".")[0] in ("torch", "megatron"):
            seen.update({(name, key): value for key, value in vars(module).items()})
    for owner in CLASSES:
        seen.update({(owner, key): value for key, value in vars(owner).items()})
    seen.update({("environ", key): value for key, value in os.environ.items()})
    return seen


def differences(before, after):
    keys = before.keys() | after.keys()
    missing = object()
    return [k for k in keys if before.get(k, missing) is not after.get(k, missing)]


def environ_differences(before, after):
    return {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)}


class TestUndo:
    def test_everything_is_put_back_by_identity(self):
        before, environ = world(), dict(os.environ)
        meta_path = list(sys.meta_path)
        builtins = dict(torch.jit._builtins._get_builtin_table())
        with CpuDevice():
            changed = differences(before, world())
            assert len(changed) > 200
            for key in [("torch.cuda", "is_available"), ("torch", "empty"), (torch.Tensor, "to"),
                        ("torch.cuda.random", "get_rng_state"), ("torch._C", "_cuda_init"),
                        ("torch.distributed.distributed_c10d", "init_process_group")]:
                assert key in changed
        after = world()
        left = [k for k in differences(before, after) if k[0] != "environ"]
        assert left == []
        assert not environ_differences(environ, dict(os.environ))
        if not any(name.startswith("megatron.core") for name in sys.modules):
            # Megatron itself replaces a method of an optimizer when it is imported.
            for owner, names in PRISTINE.items():
                assert all(vars(owner).get(name) is value for name, value in names.items())
                if isinstance(owner, type):
                    assert vars(owner).keys() == names.keys()
        assert sys.meta_path == meta_path
        assert dict(torch.jit._builtins._get_builtin_table()) == builtins
        assert logging.getLogger("megatron.core.tensor_parallel.random").filters == []

    def test_a_module_that_took_a_name_meanwhile_gets_the_original(self, monkeypatch):
        module = types.ModuleType("took_a_name")
        monkeypatch.setitem(sys.modules, "took_a_name", module)
        with CpuDevice():
            exec("from torch.cuda import synchronize; from torch import zeros", vars(module))
            assert module.synchronize() is None
        assert module.synchronize is torch.cuda.synchronize
        assert module.zeros is torch.zeros

    def test_a_module_that_had_a_name_before_gets_the_stand_in(self, monkeypatch):
        module = types.ModuleType("had_a_name")
        exec("from torch.cuda import _lazy_call, current_device, device", vars(module))
        before = dict(vars(module))
        monkeypatch.setitem(sys.modules, "had_a_name", module)
        with CpuDevice():
            called = []
            module._lazy_call(lambda: called.append(module.current_device()))
            assert called == [0]
            with module.device(0):
                pass
        assert all(vars(module)[key] is before[key] for key in before)

    @pytest.mark.parametrize("at", [0, 1, 30, -1])
    def test_all_or_nothing(self, monkeypatch, at):
        before, environ = world(), dict(os.environ)
        rows = cpu_table.table

        def broken(current):
            result = rows(current)
            result.insert(at if at >= 0 else len(result), cpu_table.Row(
                "torch.cuda", "no_such_name", cpu_table.answer(None), "a test"))
            return result

        monkeypatch.setattr(cpu_table, "table", broken)
        with pytest.raises(RuntimeError, match=r"torch\.cuda\.no_such_name does not exist"):
            CpuDevice().install()
        assert [k for k in differences(before, world()) if k[0] != "environ"] == []
        assert not environ_differences(environ, dict(os.environ))
        monkeypatch.undo()
        CpuDevice().install().uninstall()  # and the next try is not refused

    def test_a_second_install_is_refused(self, device):
        with pytest.raises(RuntimeError, match="one is installed in this process already"):
            CpuDevice().install()
        with pytest.raises(RuntimeError, match="one is installed in this process already"):
            device.install()
        assert torch.cuda.is_available()

    def test_uninstall_of_what_is_not_installed_is_refused(self, device):
        with pytest.raises(RuntimeError, match="not installed"):
            CpuDevice().uninstall()
        assert torch.cuda.is_available()

    def test_uninstall_under_another_patch_is_refused(self):
        device = CpuDevice().install()
        ours = torch.distributed.new_group
        torch.distributed.new_group = lambda: None
        try:
            with pytest.raises(RuntimeError, match=r"torch\.distributed\.new_group"):
                device.uninstall()
        finally:
            torch.distributed.new_group = ours
            device.uninstall()

    def test_an_exception_in_the_block_is_not_hidden(self):
        device = CpuDevice()
        ours = None
        with pytest.raises(ZeroDivisionError):
            with device:
                ours = torch.distributed.new_group
                torch.distributed.new_group = lambda: None
                raise ZeroDivisionError
        torch.distributed.new_group = ours
        device.uninstall()

    def test_environment_of_the_user_comes_back(self, monkeypatch):
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
        with CpuDevice():
            assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
        assert os.environ["TORCHDYNAMO_DISABLE"] == "0"
        monkeypatch.delenv("TORCHDYNAMO_DISABLE")
        with CpuDevice():
            assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
        assert "TORCHDYNAMO_DISABLE" not in os.environ


@pytest.mark.usefixtures("device")
class TestDevices:
    def test_there_is_a_device_for_every_rank(self, monkeypatch):
        assert torch.cuda.is_available()
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert torch.cuda.device_count() == 4

    def test_set_device_is_remembered_and_forgotten_by_the_next_device(self):
        assert torch.cuda.current_device() == 0
        for given, index in [(3, 3), ("cuda:1", 1), (torch.device("cuda", 2), 2), (-1, 2)]:
            torch.cuda.set_device(given)
            assert torch.cuda.current_device() == index

    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")
    @pytest.mark.parametrize("make", [
        lambda **k: torch.empty(2, **k), lambda **k: torch.zeros(2, **k),
        lambda **k: torch.ones((2,), **k), lambda **k: torch.tensor([1.0], **k),
        lambda **k: torch.as_tensor([1.0], **k), lambda **k: torch.full((2,), 1.0, **k),
        lambda **k: torch.arange(3, **k), lambda **k: torch.rand(2, **k),
        lambda **k: torch.randperm(3, **k), lambda **k: torch.zeros_like(torch.ones(2), **k),
        lambda **k: torch.ones(2).new_zeros(3, **k), lambda **k: torch.ones(2).to(**k),
        lambda **k: torch.normal(0.0, 1.0, (2,), **k), lambda **k: torch.fft.fftfreq(3, **k),
        lambda **k: torch.sparse_coo_tensor([[0]], [1.0], (2,), **k),
        lambda **k: torch.nn.Linear(2, 2, **k).weight, lambda **k: torch.ones(2).cuda(**k),
    ])  # fmt: skip
    def test_factories_make_cpu_tensors(self, make):
        for device in (torch.cuda.current_device(), "cuda", "cuda:1", torch.device("cuda", 1)):
            assert make(device=device).device == torch.device("cpu")

    def test_other_devices_are_left_alone(self):
        assert torch.empty(1, device="meta").is_meta
        assert torch.ones(1).to("meta").is_meta
        with torch.device("meta"):
            assert torch.empty(1).is_meta  # the cache behind it holds the original functions
        with torch.device("cuda"):
            assert torch.empty(1).device.type == "cpu"

    def test_pinned_memory_is_memory(self):
        assert not torch.zeros(2, pin_memory=True).is_pinned()
        data = torch.arange(3.0)
        assert data.pin_memory() is data

    def test_moving_keeps_the_object(self):
        tensor = torch.ones(2)
        assert tensor.cuda() is tensor
        assert tensor.cuda(0, non_blocking=True) is tensor
        assert tensor.to("cuda") is tensor
        assert tensor.to(torch.cuda.current_device()) is tensor
        assert tensor.to(torch.float64).dtype is torch.float64
        assert tensor.to("cuda:0", torch.bfloat16).dtype is torch.bfloat16
        assert tensor.to(torch.ones(1, dtype=torch.int32)).dtype is torch.int32
        module = torch.nn.Linear(2, 2)
        weight = module.weight
        assert module.cuda() is module and module.to("cuda") is module
        assert module.weight is weight
        tensor.record_stream(torch.cuda.current_stream())

    def test_tensor_type_names_a_gpu(self):
        tensor = torch.ones(2)
        assert tensor.type() == "torch.cuda.FloatTensor"
        assert tensor.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert tensor.half().type() == "torch.cuda.HalfTensor"
        assert torch.empty(1, device="meta").type() == "torch.meta.FloatTensor"
        half = torch.HalfTensor, torch.cuda.HalfTensor, "torch.cuda.HalfTensor", torch.half
        for target in half:
            assert tensor.type(target).dtype is torch.half
        assert isinstance(tensor, torch.cuda.FloatTensor)
        assert not isinstance(tensor, torch.cuda.HalfTensor)
        assert torch.cuda.FloatTensor([1.0]).device.type == "cpu"

    def test_tensor_type_under_a_function_mode(self):
        class Through(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {}))

        with Through():
            assert torch.ones(2).type() == "torch.cuda.FloatTensor"
            assert torch.ones(2).to("cuda").device.type == "cpu"
            assert torch.empty(1, device=0).device.type == "cpu"

    @pytest.mark.filterwarnings("ignore:.*jit.script. is deprecated:FutureWarning")
    def test_scripts_still_know_the_factories(self):
        assert torch.equal(torch.jit.script(scripted)(2), torch.zeros(2))

    def test_load_reads_into_host_memory(self, tmp_path):
        torch.save({"a": torch.ones(2)}, tmp_path / "file")
        for location in ("cuda", "cuda:0", None, "cpu"):
            loaded = torch.load(tmp_path / "file", map_location=location)
            assert loaded["a"].device.type == "cpu"

    def test_optimizers_and_data_loaders_do_not_ask_the_driver(self):
        weight = torch.nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        torch.optim.Adam([weight]).step()
        dataset = torch.utils.data.TensorDataset(torch.arange(2.0))
        with pytest.warns(UserWarning, match="no accelerator"):
            loader = torch.utils.data.DataLoader(dataset, pin_memory=True)
            assert [batch.item() for (batch,) in loader] == [0.0, 1.0]

    def test_compiling_gives_the_function_back(self):
        def function(x):
            return x + 1

        assert torch.compile(function) is function


@pytest.mark.usefixtures("device")
class TestStreamsAndMemory:
    def test_streams_are_synchronous(self):
        stream = torch.cuda.Stream(device="cuda", priority=torch.cuda.Stream.priority_range()[1])
        assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
        with torch.cuda.stream(stream), torch.cuda.device(0):
            stream.wait_stream(torch.cuda.default_stream())
            event = stream.record_event()
        stream.wait_event(event)
        event.wait()
        event.synchronize()
        stream.synchronize()
        torch.cuda.synchronize()
        assert stream.query() and event.query()
        assert not torch.cuda.is_current_stream_capturing()

    def test_events_measure_host_time(self, monkeypatch):
        from megatron_paci.cpu import stand_ins

        times = iter([1.0, 1.25])
        monkeypatch.setattr(stand_ins.time, "perf_counter", lambda: next(times))
        first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with pytest.raises(RuntimeError, match="Record both"):
            first.elapsed_time(second)
        first.record()
        second.record(torch.cuda.current_stream())
        assert first.elapsed_time(second) == pytest.approx(250.0)

    def test_memory_is_that_of_the_host(self):
        assert torch.cuda.memory_allocated() > 1 << 20
        assert torch.cuda.max_memory_allocated() >= 1 << 20
        free, total = torch.cuda.mem_get_info()
        assert 0 < free <= total == torch.cuda.get_device_properties().total_memory
        stats = torch.cuda.memory_stats()
        assert stats["allocated_bytes.all.current"] > 0 and stats["num_ooms"] == 0
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.empty_cache()

    def test_properties(self):
        assert torch.cuda.get_device_capability() == (8, 0)
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        assert (properties.major, properties.name) == (8, torch.cuda.get_device_name())

    def test_nvtx_does_nothing(self):
        torch.cuda.nvtx.range_push("a")
        torch.cuda.nvtx.range_pop()
        with torch.cuda.nvtx.range("b"):
            torch.cuda.nvtx.mark("c")


@pytest.mark.usefixtures("device")
class TestRandomNumbers:
    def test_seeding_does_not_recurse_and_gives_the_numbers_of_the_cpu(self):
        for seed_with in (torch.manual_seed, torch.cuda.manual_seed, torch.cuda.manual_seed_all,
                          torch.cuda.random.manual_seed, torch.cuda.random.manual_seed_all):
            seed_with(7)
            assert torch.initial_seed() == torch.cuda.initial_seed() == 7
            numbers = torch.rand(3)
            torch.default_generator.manual_seed(7)
            assert torch.equal(numbers, torch.rand(3))
        torch.cuda.seed()
        torch.seed()

    @pytest.mark.parametrize("module", [torch.cuda, torch.cuda.random], ids=lambda m: m.__name__)
    def test_states(self, module):
        state = module.get_rng_state()
        numbers = torch.rand(3)
        module.set_rng_state(state, device=0)
        assert torch.equal(numbers, torch.rand(3))
        module.set_rng_state_all([state] * 2)
        assert torch.equal(numbers, torch.rand(3))
        torch.cuda.default_generators[0].set_state(state)
        assert torch.equal(numbers, torch.rand(3))
        assert torch.equal(module.get_rng_state_all()[0], torch.get_rng_state())

    def test_fork_rng(self):
        before = torch.get_rng_state()
        with torch.random.fork_rng(devices=[0]):
            torch.rand(3)
        assert torch.equal(before, torch.get_rng_state())

    def test_a_data_loader_does_not_move_the_device_generator(self):
        # Only the first tensor-parallel rank loads data; the others must still draw the same masks.
        before = torch.get_rng_state()
        list(torch.utils.data.DataLoader([1, 2]))
        assert torch.equal(before, torch.get_rng_state())

    def test_megatron_is_not_told_that_both_generators_moved(self):
        logger = logging.getLogger("megatron.core.tensor_parallel.random")
        records = []
        handler = logging.Handler()
        handler.emit = records.append
        logger.addHandler(handler)
        try:
            logger.warning("CPU RNG state changed within GPU RNG context")
            logger.warning("something else")
        finally:
            logger.removeHandler(handler)
        assert [record.getMessage() for record in records] == ["something else"]


@pytest.mark.usefixtures("device")
class TestWhatIsMissing:
    @pytest.mark.parametrize("name, use", [
        (r"torch\.cuda\.CUDAGraph", lambda: torch.cuda.CUDAGraph()),
        (r"torch\.cuda\.graph", lambda: torch.cuda.graph(None)),
        (r"torch\.cuda\.MemPool", lambda: torch.cuda.MemPool()),
        (r"torch\.cuda\.ExternalStream", lambda: torch.cuda.ExternalStream(0)),
        (r"torch\.cuda\.use_mem_pool", lambda: torch.cuda.use_mem_pool(None)),
        (r"torch\.cuda\.cudart", lambda: torch.cuda.cudart()),
        (r"torch\.cuda\.utilization", lambda: torch.cuda.utilization()),
        (r"torch\.cuda\.memory\.memory_snapshot", lambda: torch.cuda.memory_snapshot()),
        (r"torch\.cuda\.memory\._snapshot", lambda: torch.cuda.memory._snapshot()),
        (r"torch\.cuda\.current_blas_handle", lambda: torch.cuda.current_blas_handle()),
        (r"torch\.cuda\.profiler\.start", lambda: torch.cuda.profiler.start()),
        (r"torch\._C\._cuda_init", lambda: torch._C._cuda_init()),
        (r"torch\._C\._cuda_synchronize", lambda: torch._C._cuda_synchronize()),
        ("a tensor on a CUDA device", lambda: torch.UntypedStorage(3, device="cuda")),
        (r"torch\.Generator on a CUDA device", lambda: torch.Generator(device="cuda")),
        (r"torch\.Generator on a CUDA device", lambda: torch.Generator(0)),
        (r"torch\.Stream on a CUDA device", lambda: torch.Stream(device="cuda")),
    ])  # fmt: skip
    def test_the_error_names_it_and_the_line_that_asked(self, name, use):
        with pytest.raises(CpuDeviceError, match=f"CPU device: {name} is not available") as error:
            use()
        assert f"{__file__}:{use.__code__.co_firstlineno}" in str(error.value)
        assert "Leave out the option" in str(error.value)

    def test_what_is_only_mentioned_is_fine(self):
        assert not isinstance(3, torch.cuda.CUDAGraph | torch.cuda.MemPool)
        assert isinstance(torch.default_generator, torch.Generator)
        assert isinstance(torch.Generator(), torch.Generator)
        assert issubclass(type("Own", (torch.cuda.CUDAGraph,), {}), torch.cuda.CUDAGraph)

    @pytest.mark.filterwarnings("ignore:TypedStorage", "ignore:.*has been renamed")
    def test_no_public_function_reaches_the_driver(self):
        """Call everything in torch.cuda: an answer, our error, or a missing argument."""
        driver = ("NVIDIA", "driver", "CUDA error", "libcuda", "libnvidia", "compiled with CUDA")
        for name in torch.cuda.__all__:
            function = getattr(torch.cuda, name)
            if isinstance(function, types.ModuleType) or not callable(function):
                continue
            try:
                function()
            except CpuDeviceError as error:
                assert "torch" in str(error)
            except Exception as error:
                assert not any(word in str(error) for word in driver), (name, error)

    def test_a_process_that_has_used_a_gpu_is_refused(self, device, monkeypatch):
        device.uninstall()
        try:
            before = world()
            monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
            with pytest.raises(RuntimeError, match="has used a GPU already"):
                CpuDevice().install()
            monkeypatch.undo()
            assert [k for k in differences(before, world()) if k[0] != "environ"] == []
        finally:
            device.install()


@pytest.mark.skipif(torch.distributed.is_initialized(), reason="there is a process group already")
def test_process_groups_over_gloo(device):
    group = torch.distributed
    group.init_process_group(
        "gloo", store=group.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    try:
        group.barrier(device_ids=[torch.cuda.current_device()])
        received, sent = torch.zeros(2), torch.ones(2)
        splits = torch.tensor([2])  # as Megatron's expert dispatcher has them
        group.all_to_all_single(received, sent, splits, splits, group=group.new_group([0]))
        assert torch.equal(received, sent)
        group.all_to_all_single(
            received, 2 * sent, output_split_sizes=splits, input_split_sizes=splits
        )
        assert torch.equal(received, 2 * sent)
    finally:
        group.destroy_process_group()


def test_numbers_are_those_of_plain_torch():
    def step():
        torch.manual_seed(3)
        random.seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.ReLU())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    plain = step()
    with CpuDevice():
        shimmed = step()
    assert all(torch.equal(a, b) for a, b in zip(plain, shimmed, strict=True))


def scripted(n: int):
    return torch.zeros(n)


def test_norm_is_let_through_with_the_mark_of_sequence_parallelism(monkeypatch):
    """The hook for a module that is imported later, tried on a stand-in for Megatron's."""
    from megatron_paci.cpu import device as device_module

    source = (
        "import torch\n"
        "class WrappedTorchNorm:\n"
        "    def __new__(cls, config, hidden_size, eps=1e-5):\n"
        "        assert not config.sequence_parallel\n"
        "        return torch.nn.LayerNorm(hidden_size, eps=eps)\n"
    )
    monkeypatch.setattr(device_module, "_TORCH_NORM", "paci_test_norm")
    config = types.SimpleNamespace(sequence_parallel=True)
    with CpuDevice():
        module = import_source("paci_test_norm", source, monkeypatch)
        norm = module.WrappedTorchNorm(config=config, hidden_size=4, eps=1e-3)
        assert norm.eps == 1e-3
        assert [p.sequence_parallel for p in norm.parameters()] == [True, True]
        assert config.sequence_parallel
        plain = module.WrappedTorchNorm(types.SimpleNamespace(sequence_parallel=False), 4)
        assert not any(hasattr(p, "sequence_parallel") for p in plain.parameters())
    with pytest.raises(AssertionError):
        module.WrappedTorchNorm(config=config, hidden_size=4)
    with CpuDevice():  # imported already: hooked at once
        module.WrappedTorchNorm(config=config, hidden_size=4)
    gc.collect()


def test_attention_is_let_through_with_context_parallelism(monkeypatch):
    """What it computes then is tried on several ranks, in tests/gloo/test_parallel.py."""
    from megatron_paci.cpu import device as device_module

    source = (
        "class DotProductAttention:\n"
        "    def __init__(self, config, layer_number):\n"
        "        assert config.context_parallel_size == 1\n"
        "        self.config, self.layer_number = config, layer_number\n"
        "    def forward(self, query, key, value, attention_mask):\n"
        "        return query, key, value, attention_mask\n"
    )
    monkeypatch.setattr(device_module, "_ATTENTION", "paci_test_attention")
    two = types.SimpleNamespace(context_parallel_size=2, window_size=None)
    one = types.SimpleNamespace(context_parallel_size=1, window_size=(4, 0))
    with CpuDevice():
        attention = import_source("paci_test_attention", source, monkeypatch).DotProductAttention
        assert attention(config=two, layer_number=3).config is two
        two.window_size = (4, 0)
        with pytest.raises(ValueError, match="--window-size .* Leave one of them out"):
            attention(two, 3)
        # With one rank nothing is changed.
        assert attention(one, 3).forward(1, 2, 3, attention_mask=None) == (1, 2, 3, None)
    with pytest.raises(AssertionError):
        attention(two, 3)
    gc.collect()


def test_adam_in_a_distributed_optimizer_has_a_state_before_loading_and_counts_of_its_own(
    monkeypatch,
):
    """Stands in for Megatron's; the real one is saved and loaded in tests/gloo/test_resume.py."""
    from megatron_paci.cpu import device as device_module

    source = (
        "import torch\n"
        "class DistributedOptimizer:\n"
        "    optimizer_state_keys = ('exp_avg', 'exp_avg_sq')\n"
        "    def __init__(self, adam):\n"
        "        self.optimizer = adam\n"
        "    def state_dict(self):\n"
        "        steps = [s['step'].item() for s in self.optimizer.state.values()]\n"
        "        assert len(set(steps)) == 1\n"
        "        return steps[0]\n"
        "    def load_state_dict(self, count):\n"
        "        step = torch.tensor(count)\n"
        "        for state in self.optimizer.state.values():\n"
        "            state['step'] = step\n"
        "    def _get_main_param_and_optimizer_states(self, param):\n"
        "        return {'param': param.view(-1), **self.optimizer.state[param]}\n"
        "    def _set_main_param_and_optimizer_states(self, param, tensors):\n"
        "        for key, own in self._get_main_param_and_optimizer_states(param).items():\n"
        "            own.copy_(tensors[key])\n"
    )
    monkeypatch.setattr(device_module, "_OPTIMIZER", "paci_test_optimizer")
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    with CpuDevice():
        module = import_source("paci_test_optimizer", source, monkeypatch)
        adam = torch.optim.AdamW(parameters)
        optimizer = module.DistributedOptimizer(adam)
        assert optimizer.state_dict() == 0
        optimizer.load_state_dict(7.0)
        for parameter in parameters:
            optimizer._set_main_param_and_optimizer_states(
                parameter, {key: torch.full((3,), 2.0) for key in ("param", "exp_avg",
                                                                   "exp_avg_sq")}
            )
            parameter.grad = torch.ones(3)
        assert [parameter.tolist() for parameter in parameters] == [[2.0] * 3] * 2
        adam.step()
        assert [adam.state[parameter]["step"].item() for parameter in parameters] == [8.0, 8.0]
        assert optimizer.state_dict() == 8
    with pytest.raises(AssertionError):
        module.DistributedOptimizer(torch.optim.AdamW(parameters)).state_dict()


def test_a_checkpoint_worker_is_given_copies_and_becomes_a_cpu_device_itself(monkeypatch):
    from megatron_paci.cpu import checkpoint_worker
    from megatron_paci.cpu import device as device_module

    writer = (
        "class FileSystemWriterAsync:\n"
        "    @staticmethod\n"
        "    def preload_tensors(write_buckets, non_blocking=True):\n"
        "        return write_buckets\n"
    )
    worker = (
        "class PersistentAsyncCaller:\n"
        "    @staticmethod\n"
        "    def async_loop(rank):\n"
        "        return rank\n"
    )
    monkeypatch.setattr(device_module, "_WRITER", "paci_test_writer")
    monkeypatch.setattr(device_module, "_WORKER", "paci_test_worker")
    tensor = torch.zeros(2)
    with CpuDevice():
        preload = import_source(
            "paci_test_writer", writer, monkeypatch
        ).FileSystemWriterAsync.preload_tensors
        [(path, key, (data, [(item, copy)]))] = preload([("p", "k", (["b"], [("i", tensor)]))])
        tensor.add_(1)
        assert (path, key, data, item, copy.tolist()) == ("p", "k", ["b"], "i", [0.0, 0.0])
        caller = import_source("paci_test_worker", worker, monkeypatch).PersistentAsyncCaller
        assert caller.async_loop is checkpoint_worker.run
    with CpuDevice(in_checkpoint_worker=True):
        assert caller.async_loop(3) == 3


def test_the_causal_mask_of_a_context_parallel_rank():
    from megatron_paci.cpu.attention import causal_mask

    # Two ranks, four chunks of two tokens: rank 0 holds the first and the last, rank 1 the others.
    whole = torch.ones(8, 8).triu(1).bool()
    assert torch.equal(causal_mask(8, 0, 2), whole[[0, 1, 6, 7]])
    assert torch.equal(causal_mask(8, 1, 2), whole[[2, 3, 4, 5]])


def import_source(name, source, monkeypatch):
    """Import a module from its source text, through sys.meta_path as any other."""
    import importlib
    import importlib.abc
    import importlib.machinery

    class Loader(importlib.abc.Loader):
        def exec_module(self, module):
            exec(source, vars(module))

    class Finder:
        @staticmethod
        def find_spec(wanted, path, target=None):
            return importlib.machinery.ModuleSpec(name, Loader()) if wanted == name else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        return importlib.import_module(name)
    finally:
        sys.meta_path.remove(Finder)
