"""The model: construction, initialisation, parameter count, the stable decay, state in and out."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mamba3_lite.errors import UserError
from mamba3_lite.models import arithmetic
from mamba3_lite.models.mamba_block import Mamba3Block, stable_decay
from mamba3_lite.models.mimo import MIMO
from mamba3_lite.models.transformer import Mamba3Transformer, ModelConfig
from mamba3_lite.training.config import load_training_config

TINY = dict(
    vocab_size=97, d_model=32, n_layers=2, n_heads=2, head_dim=16, state_dim=8, ffn_dim=64,
    chunk_size=16,
)  # fmt: skip


def tiny(**changes) -> Mamba3Transformer:
    torch.manual_seed(0)
    return Mamba3Transformer({**TINY, **changes})


def relative(got, want) -> float:
    return float((got - want).norm() / want.norm())


def test_mamba3_transformer_accepts_dict_config():
    model = Mamba3Transformer(TINY)
    assert isinstance(model.cfg, ModelConfig) and model.cfg.chunk_size == 16
    assert model(torch.randint(0, 97, (2, 33))).shape == (2, 33, 97)
    with pytest.raises(TypeError):
        Mamba3Transformer({**TINY, "d_modle": 3})


def test_the_fourteen_fields_keep_their_order_and_defaults():
    defaults = {
        "vocab_size": 50257, "d_model": 1024, "n_layers": 28, "n_heads": 16, "head_dim": 64,
        "state_dim": 64, "chunk_size": 64, "ssd_dispatch": "pytorch", "ffn_dim": 2048,
        "max_seq_len": 2048, "weight_tying": True, "rms_norm_eps": 1e-5, "init_std": 0.02,
        "grad_checkpoint": False,
    }  # fmt: skip
    assert list(vars(ModelConfig()).items())[:14] == list(defaults.items())


def test_parameters_of_the_default_model():
    with torch.device("meta"):
        model = Mamba3Transformer(ModelConfig())
    counted = sum(p.numel() for p in model.parameters())
    assert counted == arithmetic.parameter_count(ModelConfig()) == 433_662_400
    assert sum(p.numel() for p in model.layers[0].parameters()) == 13_649_936
    assert arithmetic.parameter_counts(ModelConfig())["embedding"] == 51_463_168


def test_state_dict_keys():
    names = {"in_proj", "out_proj", "mimo.mix", "ffn_gate_up", "ffn_down", "norm1", "norm2"}
    want = {"embed.weight", "norm_f.weight", "lm_head.weight"}
    for i in range(2):
        want |= {f"layers.{i}.{name}.weight" for name in names} | {f"layers.{i}.A"}
    assert set(tiny().state_dict()) == want


def test_initialisation():
    model = tiny(d_model=128, init_std=0.05)
    assert model.lm_head.weight is model.embed.weight
    for layer in model.layers:
        assert torch.equal(layer.mimo.mix.weight, torch.eye(32))
        assert layer.A.dtype == torch.complex64 and bool((layer.A == -1).all())
        assert bool((layer.norm1.weight == 1).all())
        assert float(layer.in_proj.weight.detach().std()) == pytest.approx(0.05, rel=0.05)
        assert all(m.bias is None for m in layer.modules() if isinstance(m, nn.Linear))
    untied = tiny(weight_tying=False)
    assert untied.lm_head.weight is not untied.embed.weight
    assert isinstance(model.layers[0].mimo, MIMO)


def test_block_from_a_dict_has_the_four_defaults_and_needs_the_rest():
    needed = {k: TINY[k] for k in ("d_model", "n_heads", "head_dim", "state_dim", "ffn_dim")}
    block = Mamba3Block(needed, layer_idx=3)
    assert (block.chunk_size, block.ssd_dispatch, block.grad_checkpoint) == (64, "pytorch", False)
    with pytest.raises(KeyError):
        Mamba3Block({k: v for k, v in needed.items() if k != "ffn_dim"})


def test_decay_is_the_identity_up_to_minus_one_and_negative_everywhere():
    raw = torch.tensor([-50, -3, -1, -0.5, 0, 0.058, 1, 30, 1e3, 1e9], dtype=torch.float32)
    A = torch.complex(raw, torch.arange(10.0)).requires_grad_()
    real, imag = stable_decay(A)
    assert torch.equal(real[:3], raw[:3]) and torch.equal(imag, A.imag)
    assert bool((real < 0).all()) and bool((real.diff() >= 0).all())
    real.sum().backward()
    slopes = A.grad.real
    assert bool((slopes[:9] > 0).all()), "the gradient never dies where an optimizer can walk"
    below, above = (torch.tensor([-1 + e + 0j]).requires_grad_() for e in (-1e-3, 1e-3))
    for point in (below, above):
        stable_decay(point)[0].sum().backward()
        assert float(point.grad.real) == pytest.approx(1, abs=2e-3)


def test_decay_stays_negative_under_a_hostile_optimizer():
    """Ten thousand AdamW steps that all pull towards growth."""
    A = nn.Parameter(torch.full((2,), -1.0, dtype=torch.complex64))
    optimizer = torch.optim.AdamW([A], lr=1e-2, weight_decay=0.0)
    for _ in range(10_000):
        real, _ = stable_decay(A)
        optimizer.zero_grad()
        (-real.sum()).backward()
        assert bool((A.grad.real < 0).all())
        optimizer.step()
    assert float(A.real.detach().max()) > 10
    assert float(stable_decay(A)[0].max()) < 0


def test_a_cast_that_would_drop_the_imaginary_part_is_refused_whole():
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        model = tiny()
        with pytest.raises(TypeError, match="imaginary"):
            model.to(dtype)
        assert model.embed.weight.dtype == torch.float32
        assert model.layers[0].A.dtype == torch.complex64
    with pytest.raises(TypeError, match="imaginary"):
        tiny().layers[0].to(torch.float32)
    assert tiny().double().layers[0].A.dtype == torch.complex64
    assert tiny().to("cpu").layers[0].A.dtype == torch.complex64


@pytest.mark.parametrize("dispatch", ["pytorch", "rotated"])
def test_default_production_block_is_finite_at_2048(dispatch):
    torch.manual_seed(0)
    block = Mamba3Block(ModelConfig(ssd_dispatch=dispatch))
    for name, parameter in block.named_parameters():
        if parameter.dim() == 2 and "mimo" not in name:
            nn.init.normal_(parameter, std=0.02)
    x = torch.randn(1, 2048, 1024, requires_grad=True)
    y = block(x)
    y.square().mean().backward()
    assert bool(torch.isfinite(y).all()) and bool(torch.isfinite(x.grad).all())
    for name, parameter in block.named_parameters():
        assert bool(torch.isfinite(parameter.grad).all()), name
        assert float(parameter.grad.abs().sum()) > 0, name


@pytest.mark.parametrize("dispatch", ["pytorch", "rotated"])
def test_steps_equal_the_full_forward(dispatch):
    model = tiny(ssd_dispatch=dispatch).eval()
    ids = torch.randint(0, 97, (2, 90))
    with torch.no_grad():
        want = model(ids)
        logits, state = model(ids[:, :30], return_state=True)
        assert relative(logits, want[:, :30]) < 1e-5
        for t in range(30, 90):
            logits, state = model.step(ids[:, t], state)
            assert relative(logits, want[:, t]) < 1e-5


def test_state_and_segments_and_mask_through_the_model():
    model = tiny().eval()
    ids = torch.randint(0, 97, (1, 80))
    with torch.no_grad():
        whole = model(ids)
        first, state = model(ids[:, :33], return_state=True)
        rest = model(ids[:, 33:], state=state)
        assert relative(torch.cat([first, rest], 1), whole) < 1e-5
        segments = (torch.arange(80) >= 33).long()[None]
        packed = model(ids, segment_ids=segments)
        assert relative(packed[:, 33:], model(ids[:, 33:])) < 1e-5
        mask = torch.ones(1, 90, dtype=torch.bool)
        mask[:, 40:50] = False
        padded = torch.cat([ids[:, :40], torch.full((1, 10), 5), ids[:, 40:]], 1)
        masked, end = model(padded, token_mask=mask, return_state=True)
        assert relative(masked[mask][None], whole) < 1e-5
        _, want = model(ids, return_state=True)
        assert max(map(relative, end, want)) < 1e-5


GRAD_CHECKPOINT = (False, "selective", True)  # from the most that is kept to the least


class StillHeld(TorchDispatchMode):
    """Counts the bytes of the storages that were made inside it and are alive."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        outputs = op(*args, **(kwargs or {}))
        for tensor in outputs if isinstance(outputs, tuple | list) else [outputs]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage.data_ptr()] = weakref.ref(storage), storage.nbytes()
        return outputs

    @property
    def nbytes(self):
        gc.collect()
        return sum(size for alive, size in self.storages.values() if alive() is not None)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("dispatch", ["pytorch", "rotated"])
def test_grad_checkpoint_changes_memory_and_no_gradient(dispatch, bf16):
    ids = torch.randint(0, 97, (2, 40))
    gradients, held = [], []
    for mode in GRAD_CHECKPOINT:
        model = tiny(grad_checkpoint=mode, ssd_dispatch=dispatch).train()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16), StillHeld() as counter:
            loss = model(ids).float().square().mean()
        held.append(counter.nbytes)
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))
    assert held[0] > held[1] > held[2] > 0


def test_grad_checkpoint_in_compiled_blocks():
    """The same once compiled, in one graph for all blocks, and no product is computed twice."""
    import torch._dynamo as dynamo
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    def count_products(graph, example_inputs):
        ops = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        products.append(sum(op in ("aten.mm.default", "aten.bmm.default") for op in ops))
        return make_boxed_func(graph.forward)

    def count_bytes(tensor):
        kept.append(0 if tensor.data_ptr() in masters else tensor.nbytes)
        return tensor

    # As inductor divides the work between the two passes, but without its C++ compiler.
    backend = aot_autograd(
        fw_compiler=count_products, partition_fn=min_cut_rematerialization_partition
    )
    gradients, kept_bytes, all_products = [], [], []
    for mode in GRAD_CHECKPOINT:
        dynamo.reset()
        dynamo.utils.counters.clear()
        products, kept = [], []
        model = tiny(n_layers=3, grad_checkpoint=mode, ssd_dispatch="rotated").train()
        masters = {p.data_ptr() for p in model.parameters()}
        for block in model.layers:
            block._forward_impl = torch.compile(block._forward_impl, backend=backend)
        with torch.autograd.graph.saved_tensors_hooks(count_bytes, lambda tensor: tensor):
            loss = model(torch.arange(80).view(2, 40)).square().mean()
        loss.backward()
        assert dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert len(products) == 2, "one forward and one backward graph"
        gradients.append([p.grad for p in model.parameters()])
        kept_bytes.append(sum(kept))
        all_products.append(sum(products))
    dynamo.reset()
    for other in gradients[1:]:
        assert all(relative(a, b) < 1e-5 for a, b in zip(gradients[0], other, strict=True))
    assert kept_bytes[0] > kept_bytes[1] > kept_bytes[2] > 0
    assert all_products[0] == all_products[1] > 15


def test_grad_checkpoint_is_one_of_three_values():
    for mode, text in ((False, "false"), (True, "true"), ("selective", "selective")):
        for section in ("model", "training"):
            loaded, _ = load_training_config(None, [f"{section}.grad_checkpoint={text}"])
            assert loaded.model().grad_checkpoint == mode
    for text in ("1", "selectiv", "null", "[true]"):
        for section in ("model", "training"):
            with pytest.raises(UserError, match=rf"{section}\.grad_checkpoint") as caught:
                load_training_config(None, [f"{section}.grad_checkpoint={text}"])
            assert str(caught.value).count("grad_checkpoint") == 1
    with pytest.raises(UserError, match="true, false or selective, got 'whole'"):
        ModelConfig(grad_checkpoint="whole")


# case A12
@pytest.mark.parametrize("grad_checkpoint", GRAD_CHECKPOINT)
@pytest.mark.parametrize("dispatch", ["pytorch", "rotated"])
def test_a12_bf16_autocast_keeps_gradients_in_their_own_dtype(dispatch, grad_checkpoint):
    model = tiny(ssd_dispatch=dispatch, grad_checkpoint=grad_checkpoint).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randint(0, 97, (2, 40))).float().square().mean()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == parameter.dtype, name
        assert bool(torch.isfinite(parameter.grad).all()), name


# case A17
@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_a17_compiled_blocks_agree_with_eager_ones(thorough):
    from mamba3_lite.training.pretrain import compile_blocks

    ids = torch.randint(0, 97, (2, 40))
    for dispatch in ("rotated", "pytorch")[: 2 if thorough else 1]:
        eager, compiled = (tiny(ssd_dispatch=dispatch).train() for _ in range(2))
        compile_blocks(compiled, "default")
        losses = []
        for model in (eager, compiled):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:])
                loss.backward()
                optimizer.step()
            losses.append(loss.detach())
        assert relative(losses[1], losses[0]) < 1e-5
        assert list(compiled.state_dict()) == list(eager.state_dict())


def test_no_complex_tensor_reaches_the_compiler_on_the_rotated_path():
    import torch._dynamo as dynamo

    graphs = []

    def record(graph, example_inputs):
        graphs.append((graph, example_inputs))
        return graph

    block = tiny(ssd_dispatch="rotated").layers[0].train()
    block._forward_impl = torch.compile(block._forward_impl, backend=record, fullgraph=True)
    block(torch.randn(2, 40, 32, requires_grad=True)).sum().backward()
    dynamo.reset()
    assert len(graphs) == 1, "one graph a block"
    graph, example_inputs = graphs[0]
    values = [node.meta.get("example_value") for node in graph.graph.nodes]
    tensors = [v for v in [*values, *example_inputs] if isinstance(v, torch.Tensor)]
    assert len(tensors) > 50 and not any(t.is_complex() for t in tensors)


def test_arithmetic_of_the_seed_model():
    cfg = ModelConfig()
    assert arithmetic.matmul_parameters(cfg) == 433_603_584
    assert arithmetic.model_flops_per_token(cfg) == 2_601_621_504
    assert arithmetic.training_flops_per_token(cfg) == pytest.approx(2686e6, rel=1e-3)
    checkpointed = ModelConfig(grad_checkpoint=True)
    assert arithmetic.training_flops_per_token(checkpointed) == pytest.approx(3476e6, rel=1e-3)
    assert arithmetic.forward_flops_per_token(cfg) == pytest.approx(892.9e6, rel=1e-3)
    assert arithmetic.state_bytes(cfg) == 14_680_064
    per_layer = arithmetic.activation_bytes(cfg, 16, 2048) - 2 * 16 * 2048 * 1024
    assert per_layer == 28 * 34_848 * 32_768
    selective = ModelConfig(grad_checkpoint="selective")
    kept = arithmetic.activation_bytes(selective, 16, 2048) - 2 * 16 * 2048 * 1024
    assert kept == 28 * 26_656 * 32_768
    assert arithmetic.training_flops_per_token(selective) == arithmetic.training_flops_per_token(
        cfg
    )
    model = tiny()
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    assert arithmetic.weight_bytes(model.cfg) == held
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    optimizer.step()
    moments = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    assert arithmetic.optimizer_bytes(model.cfg) == sum(m.nbytes for m in moments)
    _, state = model(torch.zeros(3, 4, dtype=torch.int64), return_state=True)
    assert arithmetic.state_bytes(model.cfg, 3) == sum(s.nbytes for s in state)


def test_impossible_sizes_are_named():
    with pytest.raises(UserError, match="model.n_layers must be at least 1"):
        ModelConfig(n_layers=0)


def test_a_compiled_backward_pass_keeps_the_ssd_in_float32(monkeypatch):
    """By default it would be traced under the forward's autocast, the SSD's products included."""
    from mamba3_lite.training.compile import compile_blocks

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: real(f, backend="aot_eager"))
    cfg = ModelConfig(
        vocab_size=31, d_model=32, n_layers=1, n_heads=2, head_dim=16, state_dim=16, ffn_dim=32,
        ssd_dispatch="rotated",
    )  # fmt: skip
    plain, compiled = Mamba3Transformer(cfg), Mamba3Transformer(cfg)
    compiled.load_state_dict(plain.state_dict())
    compile_blocks(compiled, "default")
    ids = torch.randint(cfg.vocab_size, (2, 130))
    for model in (plain, compiled):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids).float().square().sum()
        loss.backward()
    (want,), (got,) = ([layer.A.grad for layer in model.layers] for model in (plain, compiled))
    assert (got - want).norm() <= 1e-3 * want.norm()
