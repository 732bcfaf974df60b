"""A setting changes the namespace exactly if it changes the meaning of KV."""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from distributions import install
from safetensors.torch import save_file

pytest.importorskip("sglang")

from model_folder import LLAMA, model_folder
from registered_hooks import hooks_of
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.quantization import fp8, fp8_utils, w8a8_fp8
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
from sglang.srt.layers.quantization.w8a8_fp8 import (
    W8A8Fp8Config,
    W8A8Fp8LinearMethod,
    W8A8FP8MoEMethod,
)
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.lora.layers import BaseLayerWithLoRA
from sglang.srt.managers import mm_schedule
from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult, MultiModalStaticCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.runai_utils import ObjectStorageModel
from system_calls import Held
from transformers import dynamic_module_utils

from sglang_cake.core.keys import Namespace
from sglang_cake.core.layout import BlockLayout, PlaneGroup
from sglang_cake.integration.identity import weight_hooks
from sglang_cake.integration.identity.content import MAX_CODE_FILES, file_states
from sglang_cake.integration.identity.identity import (
    SHORT_BYTES,
    Identity,
    LoadedDraft,
    LoadedFiles,
    ModelSource,
    group_namespaces,
    server_fields,
)
from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache
from sglang_cake.integration.memory.kv_shard import KvShard

LAYOUT = BlockLayout.plain(4, (("k", (2, 32)), ("v", (2, 32))), "float32", 64)
(GROUP,) = LAYOUT.groups
PLUGINS = "sglang.srt.plugins"
INDEX = PlaneGroup(4, (("index", (8448,)),), "uint8", row_tokens=64)
REPEATABLE = {"enable_deterministic_inference": True}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_FP8_IGNORED_LAYERS", raising=False)


def _model(folder: Path, name: str, text: str) -> type:
    """A model class of a module of its own, as an external model package has it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.py"
    file.write_text(text)
    module: Any = type(sys)(name)
    module.__file__ = str(file)
    exec(compile(text, str(file), "exec"), module.__dict__)
    sys.modules[name] = module
    served: type = module.Served
    return served


def _built(served: type, layers: list[Any] | dict[str, Any]) -> Any:
    """A model of the class `served` with these layers, which may have names."""
    named = layers if isinstance(layers, dict) else dict(enumerate(layers))
    made = {
        "__module__": served.__module__,
        "modules": lambda model: iter(named.values()),
        "named_modules": lambda model: ((str(name), each) for name, each in named.items()),
    }
    return type(served.__name__, (served,), made)()


def _attention(k_scale: float | None, v_scale: float | None = 1.0) -> RadixAttention:
    layer = RadixAttention(1, 8, 1.0, 1, 0)
    scales = [None if each is None else torch.tensor(each) for each in (k_scale, v_scale)]
    layer.k_scale, layer.v_scale = scales
    return layer


def _digest(**changed: Any) -> bytes:
    facts: dict[str, Any] = {
        "args": {},
        "path": "/models/m",
        "dtype": "torch.float32",
        "context_len": 4096,
        "page_size": 1,
        "shard": KvShard(),
        "served": SamplingParams,  # any class of SGLang that does not read the context length
        "layout": LAYOUT,
        "codec": "raw",
        "head_groups": None,
        "end_states": None,
        "drafts": [],
        "ngram_tokens": None,
        "quantization": None,
        "fp4_experts": False,
        "device": "cpu",
        "has_states": False,
        "layers": [],
        "content": {"weights": "w", "config": "c"},
        **changed,
    }
    tokens = facts["ngram_tokens"]
    hasher = None if tokens is None else SimpleNamespace(token_map=torch.tensor(tokens))
    runner = SimpleNamespace(
        model=_built(facts["served"], facts["layers"]),
        device=facts["device"],
        ngram_embedding_manager=SimpleNamespace(engram_hasher=hasher),
    )
    ctx: Any = SimpleNamespace(
        server_args=ServerArgs(model_path=facts["path"], **facts["args"]),
        model_config=SimpleNamespace(
            model_path=facts["path"],
            dtype=facts["dtype"],
            context_len=facts["context_len"],
            quantization=facts["quantization"],
            is_fp4_experts=facts["fp4_experts"],
        ),
        params=SimpleNamespace(page_size=facts["page_size"]),
        is_hybrid_ssm=facts["has_states"],
        tp_worker=SimpleNamespace(model_runner=runner),
    )
    found = server_fields(
        ctx,
        facts["layout"],
        facts["shard"],
        codec=facts["codec"],
        head_groups=facts["head_groups"],
        end_states=facts["end_states"],
        drafts=facts["drafts"],
    )
    return Namespace(tuple((found | facts["content"]).items())).digest()


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "torch.bfloat16"},
        {"page_size": 16},
        {"shard": KvShard(index=1)},
        {"shard": KvShard(count=2)},
        {"codec": "int8"},
        {"head_groups": 1},
        {"end_states": "[]"},
        {"shard": KvShard(end_rank=(0, 2))},
        {"args": {"mamba_ssm_dtype": "float32"}},
        {"content": {"weights": "w2", "config": "c"}},
        {"content": {"weights": "w", "config": "c2"}},
        {"content": {"weights": "w", "config": "c", "beside": "scales"}},
        {"args": {"quantization": "fp8"}},
        {"args": {"enable_decoder_swa_bounded_replay": True}},
        {"args": {"enable_deepseek_v4_fp4_indexer": True}},
        {"args": {"weight_version": "step-2"}},
        {"args": {"load_format": "mistral"}},
        {"args": {"model_impl": "transformers"}},
        {"args": {"json_model_override_args": '{"rope_theta": 1.0}'}},
        {"args": REPEATABLE},
        {"layout": replace(LAYOUT, groups=(replace(GROUP, dtype="bfloat16"),))},
        {"layout": replace(LAYOUT, block_tokens=128)},
        {"layout": replace(LAYOUT, groups=(replace(GROUP, layers=5),))},
        {"layout": replace(LAYOUT, groups=(replace(GROUP, parts=(("kv", (1, 96)),)),))},
        {"layout": replace(LAYOUT, groups=(replace(GROUP, row_tokens=64),))},
        {"layout": replace(LAYOUT, groups=(GROUP, INDEX))},
    ],
    ids=str,
)
def test_identity_changed_fact_changes_the_namespace(
    changed: dict[str, Any],
) -> None:
    assert _digest() == _digest()
    assert _digest(**changed) != _digest()


def test_identity_other_tokenizer_of_an_engram_model_changes_the_namespace() -> None:
    digests = {_digest(ngram_tokens=tokens) for tokens in (None, [0, 1, 1], [0, 1, 2])}
    assert len(digests) == 3
    assert _digest(ngram_tokens=[0, 1, 2]) in digests


def test_identity_head_groups_any_rank_of_any_number_has_the_same_keys() -> None:
    of_two = _digest(head_groups=4, shard=KvShard(1, 2))
    assert of_two == _digest(head_groups=4, shard=KvShard(3, 4))
    assert of_two != _digest(head_groups=8, shard=KvShard(1, 2))


def test_identity_head_groups_have_a_namespace_each() -> None:
    namespace = Namespace((("model", "m"), ("head_groups", "4")))
    found = group_namespaces(namespace, range(2, 4))
    assert [each.describe()["head_group"] for each in found] == ["2", "3"]
    assert len({each.digest() for each in (*found, namespace)}) == 3
    assert group_namespaces(namespace, None) == [namespace]


def _with_draft(
    dtype: str = "float32", served: type = SamplingParams, layers: Sequence[Any] = (), **args: Any
) -> bytes:
    model = SimpleNamespace(dtype=f"torch.{dtype}", quantization=None)
    runner = SimpleNamespace(model_config=model, model=_built(served, list(layers)))
    draft = LoadedDraft(runner, ModelSource("d"), None)
    return _digest(drafts=[draft], args={"speculative_algorithm": "EAGLE", **args})


def test_identity_changed_draft_model_changes_the_namespace() -> None:
    names = [
        _digest(),
        _with_draft(),
        _with_draft(dtype="bfloat16"),
        _with_draft(served=type("Other", (SamplingParams,), {"__module__": "sglang.other"})),
        _with_draft(speculative_algorithm="STANDALONE"),
        _with_draft(speculative_draft_model_quantization="fp8"),
        _with_draft(speculative_draft_window_size=512),
    ]
    assert len(set(names)) == len(names)
    assert _with_draft() == _with_draft(speculative_num_steps=7) == _with_draft()
    assert _digest(args={"speculative_algorithm": "NGRAM"}) == _digest()


def test_identity_other_plugins_of_sglang_count_with_version_and_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may patch a model or a kernel. Those that SGLANG_PLUGINS leaves out do not count."""
    names = [_digest()]
    for folder, number, code in (
        ("1", "1", "pass"),
        ("2", "1", "pass"),
        ("3", "2", "pass"),
        ("4", "1", "1"),
    ):
        site, entry_point = tmp_path / folder, "other = cake_other_plugin:register"
        install(site, "cake_other_plugin", PLUGINS, entry_point, version=number)
        (site / "cake_other_plugin.py").write_text(f"def register():\n    {code}\n")
        (site / "neighbour.py").write_text(f"# of {folder}, as others in site-packages\n")
        monkeypatch.delitem(sys.modules, "cake_other_plugin", raising=False)
        with monkeypatch.context() as installed:
            installed.syspath_prepend(str(site))
            names.append(_digest())
            installed.setenv("SGLANG_PLUGINS", "cake")
            assert _digest() == names[0]
    assert names[1] == names[2]
    assert len(set(names)) == 4


def test_identity_plugin_whose_entry_point_is_a_module_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang imports it, which may patch, and cannot call it."""
    install(tmp_path, "cake_patches", PLUGINS, "patches = cake_patches")
    (tmp_path / "cake_patches.py").write_text("")
    before = _digest()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert _digest() == _digest() != before


def test_identity_algorithm_of_a_plugin_counts_with_its_code(
    register_algorithm: Callable[..., None], tmp_path: Path
) -> None:
    names = [_digest()]
    for code in ("def worker(args): ...", "def worker(args): return 1"):
        (tmp_path / "mine.py").write_text(code)
        scope: dict[str, Any] = {"__name__": "mine"}
        exec(compile(code, tmp_path / "mine.py", "exec"), scope)
        register_algorithm("MINE", factory=scope["worker"])
        names += [_digest(args={"speculative_algorithm": "MINE"}) for _ in range(2)]
    assert names[1] == names[2]
    assert names[3] == names[4]
    assert len(set(names)) == 3
    register_algorithm("MINE", factory=partial(scope["worker"]))  # its code is not known
    assert len({_digest(args={"speculative_algorithm": "MINE"}) for _ in range(2)}) == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"path": "/elsewhere/another-name"},
        {"context_len": 8192},
        {"args": {"context_length": 8192}},
        {"args": {"tp_size": 8, "attn_dp_size": 8}},  # the shard says it all
        {"shard": KvShard(holder=3, holders=8)},
        {"args": {"load_format": "layered"}},
        {"args": {"port": 40000, "mem_fraction_static": 0.5, "chunked_prefill_size": 512}},
        {"args": {"attention_backend": "torch_native"}},
    ],
    ids=str,
)
def test_identity_fact_unrelated_to_kv_keeps_the_namespace(
    changed: dict[str, Any],
) -> None:
    assert _digest(**changed) == _digest()


def test_identity_deterministic_inference_counts_all_ranks() -> None:
    """The order of sums over ranks is not the same for another number of them."""
    digests = {
        _digest(args=REPEATABLE | ranks)
        for ranks in ({}, {"tp_size": 2}, {"tp_size": 8}, {"tp_size": 8, "attn_dp_size": 8})
    }
    assert len(digests) == 4


def test_identity_deterministic_inference_counts_versions_of_packages_with_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = []
    for number in ("0.7.2", "0.7.3"):
        install(tmp_path / number, "flashinfer_python", PLUGINS, version=number)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path / number)
            digests.append([_digest(args=args) for args in ({}, REPEATABLE)])
    assert digests[0][0] == digests[1][0]
    assert digests[0][1] != digests[1][1]


@pytest.mark.parametrize("name", ["attention_backend", "prefill_attention_backend"])
@pytest.mark.parametrize(("k_scale", "v_scale"), [(0.5, 1.0), (1.0, 0.5)])
def test_identity_attention_backend_counts_where_kv_is_divided_by_scales(
    name: str, k_scale: float, v_scale: float
) -> None:
    """Of SGLang's backends, some divide K and V before they store them, and some do not."""
    native = {"args": {name: "torch_native"}}
    for layers in ([], [_attention(None, None)], [_attention(1.0)], [SimpleNamespace(k_scale=2)]):
        assert _digest(layers=layers, **native) == _digest(layers=layers) == _digest()
    unknown = _attention(1.0)
    unknown.k_scale = torch.tensor(1.0, device="meta")  # of `--offload-mode meta`
    for layers in ([_attention(1.0), _attention(k_scale, v_scale)], [unknown]):
        assert _digest(layers=layers, **native) != _digest(layers=layers)


@pytest.mark.parametrize("name", ["use_irope", "logit_cap", "xai_temperature_len"])
def test_identity_attention_backend_counts_where_some_compute_another_attention(name: str) -> None:
    """Chunks of Llama 4, a cap of Gemma 2 and a temperature of Grok: fa3 has the chunks and
    trtllm_mha has not, and these are SGLang's defaults on two generations of GPUs."""
    fa3, trtllm = ({"attention_backend": name} for name in ("fa3", "trtllm_mha"))
    layer = _attention(None, None)
    assert _digest(layers=[layer], args=fa3) == _digest(layers=[layer], args=trtllm)
    setattr(layer, name, 30)
    assert _digest(layers=[layer], args=fa3) != _digest(layers=[layer], args=trtllm)


@pytest.mark.parametrize("name", ["attention_backend", "decode_attention_backend"])
@pytest.mark.parametrize(
    ("groups", "counts"),
    [
        ((GROUP,), False),
        ((replace(GROUP, dtype="float8_e4m3fn"),), True),
        ((replace(GROUP, dtype="float8_e5m2"),), True),
        ((GROUP, replace(GROUP, dtype="float8_e4m3fn", parts=(("draft_k", (2, 32)),))), True),
        ((GROUP, replace(INDEX, dtype="float8_e4m3fn")), False),
        ((GROUP, INDEX), False),
    ],
    ids=["plain", "e4m3", "e5m2", "draft", "index", "packed index"],
)
def test_identity_attention_backend_counts_where_kv_is_in_fp8(
    name: str, groups: tuple[PlaneGroup, ...], counts: bool
) -> None:
    """fa3 rounds queries to FP8 then, and FlashInfer does not."""
    layout = replace(LAYOUT, groups=groups)
    digests = {_digest(layout=layout, args={name: each}) for each in ("fa3", "flashinfer")}
    assert (len(digests) == 2) == counts


BYTES = {"layout": replace(LAYOUT, groups=(GROUP, INDEX))}


@pytest.mark.parametrize("changed", [{"has_states": True}, BYTES], ids=["states", "index"])
def test_identity_device_counts_where_it_decides_the_form_of_memory(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    """Kernels for CPUs have states of linear attention transposed; those for AMD's GPUs have other
    pages of an index, which some rotate."""
    assert _digest(device="cpu") == _digest(device="cuda")
    digests = {_digest(device=device, **changed) for device in ("cpu", "cuda")}
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for arch in ("gfx942", "gfx950"):
        found = SimpleNamespace(gcnArchName=arch)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda found=found: found)
        for writer in ("use_aiter_fused_fp8_writer", "use_gfx950_fused_indexer", "other"):
            layers = [SimpleNamespace(**{writer: True})]
            digests.add(_digest(device="cuda", layers=layers, **changed))
    assert len(digests) == 8


def test_identity_environment_variable_of_kv_changes_the_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = _digest()
    monkeypatch.setenv("SGLANG_FP8_IGNORED_LAYERS", "model.layers.0")
    assert _digest() != before


def test_identity_external_model_code_changes_the_namespace(tmp_path: Path) -> None:
    text = "class Served:\n    scale = {}\n"
    digests = []
    for folder, scale in (("1", 1), ("2", 1), ("3", 2)):
        served = _model(tmp_path / folder, "cake_external_1", text.format(scale))
        digests.append(_digest(served=served))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("linked", [False, True])
def test_identity_external_model_code_in_a_subpackage_changes_the_namespace(
    tmp_path: Path, linked: bool
) -> None:
    """A link to a folder above does not make it endless."""
    digests = []
    for folder, scale in (("1", 1), ("2", 1), ("3", 2)):
        top = tmp_path / folder
        served = _model(top, "cake_external_3", "class Served:\n    pass\n")
        below = tmp_path / f"{folder}-code" if linked else top / "layers"
        below.mkdir()
        (below / "attention.py").write_text(f"SCALE = {scale}\n")
        (below / "above").symlink_to(top, target_is_directory=True)
        if linked:
            (top / "layers").symlink_to(below, target_is_directory=True)
        digests.append(_digest(served=served))
    assert digests[0] == digests[1] != digests[2]


def test_identity_external_model_code_counts_with_its_whole_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = []
    for folder, scale in (("1", 1), ("2", 2)):
        top = tmp_path / folder
        served = _model(top / "models", "cake_external_4.models", "class Served:\n    pass\n")
        (top / "layers.py").write_text(f"SCALE = {scale}\n")
        package = SimpleNamespace(__path__=[str(top)])
        monkeypatch.setitem(sys.modules, "cake_external_4", cast(Any, package))
        digests.append(_digest(served=served))
    assert digests[0] != digests[1]


def test_identity_external_model_code_of_too_many_files_is_of_one_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served = _model(tmp_path, "cake_external_5", "class Served:\n    pass\n")
    for number in range(MAX_CODE_FILES):
        (tmp_path / f"other_{number}.py").touch()
    assert _digest(served=served) != _digest(served=served)
    assert "the code of Served is unknown" in caplog.text


def test_identity_code_of_another_repository_changes_the_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto_map` of the model in `model` names code of `code`, which imports a file beside it."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    digests = []
    for scale in (1, 1, 2):
        code = tmp_path / "code"
        code.mkdir(exist_ok=True)
        (code / "modeling.py").write_text("from .scales import SCALE\n\nclass Model: ...\n")
        (code / "scales.py").write_text(f"SCALE = {scale}\n")
        name = f"{code}--modeling.Model"
        dynamic_module_utils.get_class_from_dynamic_module(name, str(tmp_path / "model"))
        digests.append(_digest())
        for module in [each for each in sys.modules if each.startswith("transformers_modules")]:
            monkeypatch.delitem(sys.modules, module)
    assert digests[0] == digests[1] != digests[2]
    assert _digest() not in digests


@pytest.mark.parametrize(
    ("quantization", "fp4_experts", "digests"),
    [
        (None, False, 1),
        ("gptq_marlin", False, 1),
        ("w8a8_int8", False, 1),
        ("fp8", False, 2),
        ("fp8", True, 3),
        ("modelopt_fp4", False, 3),
        ("compressed-tensors", False, 3),
    ],
)
def test_identity_gpu_that_quantises_no_activations_counts_for_such_models(
    monkeypatch: pytest.MonkeyPatch, quantization: str | None, fp4_experts: bool, digests: int
) -> None:
    """Ampere, Ada, Hopper and Blackwell: SGLang picks kernels of Marlin by the device."""
    found = set()
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda at=capability: at)
        found.add(_digest(device="cuda", quantization=quantization, fp4_experts=fp4_experts))
    assert len(found) == digests


@pytest.mark.parametrize(
    ("quantization", "shared"),
    [
        (None, True),
        ("w8a8_int8", True),
        ("fp8", False),
        ("gptq", False),
        ("awq", False),
        ("mxfp4", False),
        ("compressed-tensors", False),
    ],
)
def test_identity_cpu_counts_for_models_whose_activations_gpus_treat_in_another_way(
    monkeypatch: pytest.MonkeyPatch, quantization: str | None, shared: bool
) -> None:
    """AMX quantises the activations of AWQ and GPTQ, and not those of FP8."""
    found = set()
    for capability in ((8, 0), (9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda at=capability: at)
        found.add(_digest(device="cuda", quantization=quantization))
    assert (_digest(device="cpu", quantization=quantization) in found) == shared
    if not shared:
        assert _digest(device="cpu", quantization=quantization) != _digest(device="cpu")


@pytest.mark.parametrize(
    ("quantization", "fp4_experts", "digests"),
    [
        (None, False, 1),
        ("gptq", False, 1),
        ("fp8", False, 1),
        ("fp8", True, 3),
        ("mxfp4", False, 3),
        ("quark", False, 3),
    ],
)
def test_identity_amds_gpus_count_for_models_with_fp4(
    monkeypatch: pytest.MonkeyPatch, quantization: str | None, fp4_experts: bool, digests: int
) -> None:
    """Only gfx950 multiplies FP4, and its activations are others than those of Blackwell."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    facts = {"device": "cuda", "quantization": quantization, "fp4_experts": fp4_experts}
    found = {_digest(**facts)}
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for arch in ("gfx942:sramecc+:xnack-", "gfx942", "gfx950"):
        named = SimpleNamespace(gcnArchName=arch)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda named=named: named)
        found.add(_digest(**facts))
    assert len(found) == digests


@pytest.mark.parametrize("runner", ["triton", "triton_kernel"])
def test_identity_mxfp4_with_kernels_of_triton_has_the_namespace_of_gpus_without_fp4(
    monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    def digest(capability: tuple[int, int], runner: str, quantization: str | None) -> bytes:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        args = {"moe_runner_backend": runner}
        return _digest(device="cuda", args=args, quantization=quantization)

    hopper, blackwell, default = (9, 0), (10, 0), "flashinfer_mxfp4"
    assert digest(blackwell, runner, "mxfp4") != digest(blackwell, default, "mxfp4")
    assert digest(blackwell, runner, "mxfp4") == digest(hopper, runner, "mxfp4")
    assert digest(blackwell, runner, None) == digest(blackwell, default, None)


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def _projections(config: dict[str, Any] = BLOCKS, *, ue8m0: bool = False, scales: int = 24) -> Any:
    """Three projections in one layer in FP8, as SGLang has loaded them.

    Args:
        config: `quantization_config` of the checkpoint.
        ue8m0: whether the scales are in DeepGEMM's form, where all are powers of two.
        scales: how many there are.
    """
    layer: Any = torch.nn.Module()
    quantised = Fp8Config.from_config({"activation_scheme": "dynamic", **config})
    layer.quant_method = Fp8LinearMethod(quantised)
    layer.logical_widths = [8, 8, 8]
    scale: Any = torch.nn.Parameter(torch.ones(scales), requires_grad=False)
    scale.format_ue8m0 = ue8m0
    is_plain = "weight_block_size" not in config and config["quant_method"] == "fp8"
    layer.register_parameter("weight_scale" if is_plain else "weight_scale_inv", scale)
    return layer


def test_identity_weights_that_deepgemm_has_requantised_count() -> None:
    """Its scales on Blackwell are powers of two. On Hopper, and with other kernels, the weights are
    those of the files."""
    plain, other = _projections(), _projections(ue8m0=True)
    assert _digest(layers=[plain]) == _digest() != _digest(layers=[other])
    assert _with_draft(layers=[plain]) == _with_draft() != _with_draft(layers=[other])
    found = {
        _digest(layers={"layers.0.o_proj": linear, "layers.0.experts": experts})
        for linear in (plain, other)
        for experts in (plain, other)  # a runner of experts takes other kernels
    }
    assert len(found) == 4


def test_identity_sglangs_own_requantisation_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function runs here as on Blackwell. There, DeepGEMM packs the scales as well."""
    needed = "sglang.srt.model_loader.utils.should_deepgemm_weight_requant_ue8m0"
    monkeypatch.setattr(needed, lambda **_: True)
    monkeypatch.setattr(fp8_utils, "transform_scale_ue8m0", lambda scales, mn: scales)
    layer = _projections()
    layer.weight = torch.nn.Parameter(torch.randn(128, 256).to(torch.float8_e4m3fn), False)
    layer.weight_scale_inv.data = torch.full((1, 2), 0.3)
    assert _digest(layers=[layer]) == _digest()
    assert fp8_utils.requant_block_scale_ue8m0_for_deepgemm(
        layer.weight, layer.weight_scale_inv, [128, 128], use_deepgemm_runner=True
    )
    assert _digest(layers=[layer]) != _digest()


@pytest.mark.parametrize(
    "config", [{**BLOCKS, "scale_fmt": "ue8m0"}, {"quant_method": "mxfp8"}], ids=["fp8", "mxfp8"]
)
def test_identity_scales_that_are_powers_of_two_in_the_checkpoint_do_not_count(
    config: dict[str, Any],
) -> None:
    assert _digest(layers=[_projections(config, ue8m0=True)]) == _digest()


def test_identity_requantised_layer_counts_alike_in_every_block_and_beside_adapters() -> None:
    other = _projections(ue8m0=True)
    one = _digest(layers={"layers.0.o_proj": other})
    assert one == _digest(layers={"layers.0.o_proj": other, "layers.1.o_proj": other})
    assert one == _digest(layers={"layers.0.o_proj.base_layer": other})


def test_identity_mxfp8_that_became_blocks_counts() -> None:
    """On GPUs that cannot multiply it. SGLang marks it in the method of the layer."""
    layer = _projections({"quant_method": "mxfp8"})
    layer.quant_method.use_mxfp8 = False
    assert _digest(layers=[layer]) != _digest()


def test_identity_scale_of_all_projections_in_the_place_of_theirs_counts() -> None:
    """On RTX 50, where other GPUs have a scale for each channel."""
    config = {"quant_method": "fp8"}
    assert _digest(layers=[_projections(config)]) == _digest()
    assert _digest(layers=[_projections(config, scales=1)]) != _digest()
    single = _projections(config, scales=1)
    single.logical_widths = [24]
    assert _digest(layers=[single]) == _digest()


@pytest.mark.parametrize("kind", ["fp8", "w8a8_fp8"])
def test_identity_one_scale_of_weights_that_sglang_has_quantised_counts(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On AMD, and on Ada with CUDA before 12.4, where other GPUs have a scale for each channel."""
    module, quantised, linear = {
        "fp8": (fp8, Fp8Config, Fp8LinearMethod),
        "w8a8_fp8": (w8a8_fp8, W8A8Fp8Config, W8A8Fp8LinearMethod),
    }[kind]
    monkeypatch.setattr(module, "per_token_group_quant_fp8", _scaled_channels)  # needs a GPU
    found = []
    for by_channel in (True, False):
        layer = torch.nn.Module()
        method = layer.quant_method = cast(Any, linear)(quantised(False))
        method.cutlass_fp8_supported = by_channel
        method.create_weights(layer, 64, [24], 64, 24, torch.bfloat16, weight_loader=None)
        method.process_weights_after_loading(layer)
        found.append(_digest(layers=[layer]))
    assert found[0] == _digest() != found[1]


def _scaled_channels(weight: torch.Tensor, _: int) -> tuple[torch.Tensor, torch.Tensor]:
    return weight.to(torch.float8_e4m3fn), torch.ones(len(weight), 1)


@pytest.mark.parametrize("in_files", [False, True])
def test_identity_experts_cast_to_fp8_of_amds_form_count(
    in_files: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On MI300. SGLang casts the weights without a scale, and FP8 has other steps there."""
    found = []
    for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        monkeypatch.setattr(w8a8_fp8, "fp8_dtype", dtype)
        layer = torch.nn.Module()
        method = layer.quant_method = cast(Any, W8A8FP8MoEMethod)(W8A8Fp8Config(in_files))
        method.create_weights(layer, 2, 16, 8, torch.bfloat16)
        method.process_weights_after_loading(layer)
        found.append(_digest(layers=[layer]))
    assert found[0] == _digest() != found[1]


def test_identity_context_length_counts_for_a_model_that_reads_it(tmp_path: Path) -> None:
    text = "class Served:\n    def __init__(self, config=None):\n        self.n = {}\n"
    reads = _model(tmp_path / "1", "cake_external_2", text.format("config and config.context_len"))
    digests = [_digest(served=reads, context_len=n) for n in (4096, 8192)]
    assert digests[0] != digests[1]


# ---- the namespace while weights and adapters change ----


class Named:
    """An `Identity` for a model in a folder, and all namespaces that it has published.

    Attributes:
        identity: takes results at once if `reduce_min` is None, else in `poll`.
        loaded: the files as SGLang has loaded them.
        layers: of the model, as SGLang has loaded it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        reduce_min: Any = None,
        layers: Sequence[Any] = (),
        model_config: Any = None,
        quantization: str | None = None,
        **args: Any,
    ) -> None:
        self.published: list[Namespace] = []
        self.layers = torch.nn.ModuleList(layers)
        read = SimpleNamespace(model_path=str(folder), revision=None, quantization=quantization)
        ctx: Any = SimpleNamespace(
            server_args=ServerArgs(model_path=str(folder), **args),
            model_config=model_config or read,
            tp_worker=SimpleNamespace(
                model_runner=SimpleNamespace(
                    model=self.layers,
                    lora_manager=SimpleNamespace(
                        target_modules={"o_proj"}, experts_shared_outer_loras=False
                    ),
                )
            ),
        )
        self.values = ctx.server_args
        self.loaded = LoadedFiles(True)
        source = ModelSource.of(ctx.model_config, self.values.download_dir)
        self.loaded.reads(source, self.values)
        self.loaded.weights = source.weights_or_none()
        self.identity = Identity(
            ctx,
            {"format": "auto", "weight_version": "default", "layout": "l"},
            reduce_min=reduce_min,
            on_known=self.published.append,
            loaded=self.loaded,
        )

    @property
    def digest(self) -> bytes:
        return self.published[-1].digest()

    def load_draft(self, folder: Path) -> None:
        """Record a draft model as SGLang loads it."""
        source = ModelSource(str(folder))
        self.loaded.reads(source, self.values)
        draft = LoadedDraft(SimpleNamespace(), source, source.weights_or_none())
        self.loaded.drafts.append(draft)

    @property
    def weights(self) -> str:
        return self.published[-1].describe()["weights"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _checkpoint(folder: Path, value: float, *, config: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.full((4,), value)}, folder / "model.safetensors")
    if config:
        (folder / "config.json").write_text("{}")
    return folder


def _snapshot(cache: Path) -> Path:
    """The folder of the model some/model in a cache of Hugging Face. It is not there yet."""
    repo = cache / "models--some--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    return repo / "snapshots" / ("0" * 40)


def _started(folder: Path, value: float) -> Named:
    """A server whose weights have this value, and are named."""
    one = Named(_checkpoint(folder, value))
    one.identity.start()
    return one


def test_identity_start_names_the_model_by_its_content(tmp_path: Path) -> None:
    one = _started(tmp_path / "a", 1.0)
    same = _started(tmp_path / "b", 1.0)
    other = _started(tmp_path / "c", 2.0)
    assert one.digest == same.digest != other.digest
    assert not one.identity.is_private


def test_identity_model_changed_while_loading_is_private(tmp_path: Path) -> None:
    one = Named(_checkpoint(tmp_path / "a", 1.0))
    _checkpoint(tmp_path / "a", 2.0)
    one.identity.start()
    assert one.identity.is_private


@pytest.mark.parametrize("changed", ["config.json", "model.py", "new.json", "scales.json"])
def test_identity_configuration_changed_while_loading_stays_private_after_an_update(
    tmp_path: Path, changed: str
) -> None:
    """SGLang computes with the old one, also with other weights. `scales.json` is of
    `--quantization-param-path`."""
    folder, beside = _checkpoint(tmp_path / "a", 1.0), tmp_path / "beside"
    beside.mkdir()
    (folder / "model.py").write_text("")
    (beside / "scales.json").write_text("{}")
    args = {"trust_remote_code": True, "quantization_param_path": str(beside / "scales.json")}
    named = Named(folder, **args)
    one = Named(folder, **args)
    named.identity.start()
    assert not named.identity.is_private
    (beside if changed == "scales.json" else folder).joinpath(changed).write_text("1")
    one.identity.start()
    assert one.identity.is_private
    one.identity.weights_changed(file_states(folder.glob("*.safetensors")), "auto", None)
    assert one.identity.is_private


def test_identity_files_that_the_load_downloads_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be newer than the process. A file that was there before must not change."""
    folder = _checkpoint(_snapshot(tmp_path), 1.0)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = []
    for edited in (False, True):
        (folder / "model.safetensors").unlink()
        (folder / "hf_quant_config.json").unlink(missing_ok=True)
        one = Named(Path("some/model"))
        (folder / "hf_quant_config.json").write_text("{}")
        if edited:
            (folder / "config.json").write_text("{} ")
        _checkpoint(folder, 1.0, config=False)
        one.identity.start()
        found.append(one.identity.is_private)
    assert found == [False, True]


def test_identity_configuration_of_the_default_cache_counts_beside_a_download_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang reads config.json from there, and the weights from `--download-dir`."""
    config = _snapshot(tmp_path / "default") / "config.json"
    config.parent.mkdir(parents=True)
    _checkpoint(_snapshot(tmp_path / "weights"), 1.0, config=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "default"))
    found = []
    for text in ("{}", '{"rope_theta": 7}', "{}"):
        config.write_text(text)
        one = Named(Path("some/model"), download_dir=str(tmp_path / "weights"))
        one.identity.start()
        assert not one.identity.is_private
        found.append(one.digest)
    assert found[0] == found[2] != found[1]
    one = Named(Path("some/model"), download_dir=str(tmp_path / "weights"))
    config.write_text("{} ")
    one.identity.start()
    assert one.identity.is_private  # it changed while the weights were loaded


def test_identity_load_that_was_not_observed_is_private(tmp_path: Path) -> None:
    one = Named(_checkpoint(tmp_path / "a", 1.0))
    one.loaded.model_recorded = False
    one.identity.start()
    assert one.identity.is_private


def test_identity_update_takes_new_weights_and_keeps_the_config(tmp_path: Path) -> None:
    one = _started(tmp_path / "a", 1.0)
    new = _checkpoint(tmp_path / "new", 2.0)
    (new / "config.json").write_text('{"rope_theta": 7}')  # SGLang does not read it again
    one.identity.weights_changed(file_states(new.glob("*.safetensors")), "auto", None)
    started = _started(tmp_path / "b", 2.0)
    assert one.digest == started.digest
    with_new_config = Named(new)
    with_new_config.identity.start()
    assert one.digest != with_new_config.digest


@pytest.mark.parametrize("had_scales", [False, True])
def test_identity_update_with_scales_of_kv_before_or_after_it_is_private(
    tmp_path: Path, had_scales: bool
) -> None:
    """SGLang reads the scales of NVFP4 once, so KV of the new weights would have the old ones."""
    one = Named(_checkpoint(tmp_path / "a", 1.0), layers=[_attention(0.5 if had_scales else 1.0)])
    one.identity.start()
    one.layers[0].k_scale = _attention(1.0 if had_scales else 0.5).k_scale
    one.identity.weights_changed(file_states((tmp_path / "a").glob("*.safetensors")), "auto", None)
    assert one.identity.is_private


@pytest.mark.parametrize("quantization", ["fp8", "mxfp4", "modelopt_fp4"])
def test_identity_update_of_a_quantised_model_is_private(tmp_path: Path, quantization: str) -> None:
    """SGLang repacks its weights after a load, and not each method can do that again."""
    one = Named(_checkpoint(tmp_path / "a", 1.0), quantization=quantization)
    one.identity.start()
    assert not one.identity.is_private
    one.identity.weights_changing()
    one.identity.weights_changed(file_states((tmp_path / "a").glob("*.safetensors")), "auto", None)
    assert one.identity.is_private


def test_identity_private_update_names_the_format_of_its_files(tmp_path: Path) -> None:
    """`store describe` shows it."""
    one = Named(_checkpoint(tmp_path / "a", 1.0), layers=[_attention(0.5)])
    one.identity.start()
    one.identity.weights_changed(file_states((tmp_path / "a").glob("*.safetensors")), "pt", None)
    assert one.identity.is_private
    assert one.published[-1].describe()["format"] == "pt"


def test_identity_update_with_hooks_in_the_model_is_private(tmp_path: Path) -> None:
    """They change the computation with any weights."""
    one = Named(_checkpoint(tmp_path / "a", 1.0), forward_hooks=[{"name": "h"}])
    one.identity.start()
    one.identity.weights_changed(file_states((tmp_path / "a").glob("*.safetensors")), "auto", None)
    assert one.identity.is_private


def test_identity_digest_ready_after_weights_began_to_change_names_nothing(
    tmp_path: Path,
) -> None:
    """Weights are pushed over many steps. Between them the model is neither the old nor the new."""
    one = Named(_checkpoint(tmp_path / "a", 1.0), reduce_min=lambda tensor: None)
    one.identity.start()
    one.identity.weights_changing()
    one.identity.poll()
    assert one.published == []


def test_identity_update_while_the_first_weights_are_hashed_is_known_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large weights are hashed in the background. The update cancels that, and nothing else."""
    first = _checkpoint(tmp_path / "a", 1.0)
    os.truncate(first / "model.safetensors", SHORT_BYTES + 1)
    one = Named(first, reduce_min=lambda tensor: None)
    files = file_states(_checkpoint(tmp_path / "new", 2.0).glob("*.safetensors"))
    held = Held(os.readv)

    def readv(fd: int, buffers: Sequence[Any]) -> Any:
        read = held if os.fstat(fd).st_size > SHORT_BYTES else held.real
        return read(fd, buffers)

    monkeypatch.setattr(os, "readv", readv)
    one.identity.start()
    assert held.entered.wait(60)
    one.identity.weights_changing()
    one.identity.weights_changed(files, "auto", None)
    one.identity.wait()
    assert len(one.published) == 1
    assert not one.identity.is_private
    started = _started(tmp_path / "b", 2.0)
    started.identity.wait()
    assert one.digest == started.digest
    held.go.set()


@pytest.mark.parametrize("load_format", ["dummy", None])
def test_identity_update_in_unknown_format_is_private(
    tmp_path: Path, load_format: str | None
) -> None:
    one = _started(tmp_path / "a", 1.0)
    files = file_states((tmp_path / "a").glob("*.safetensors"))
    one.identity.weights_changed(files, load_format, None)
    first = one.weights
    one.identity.weights_changed(files, load_format, None)
    assert one.identity.is_private
    assert one.weights != first


def test_identity_names_the_draft_model_by_its_content(tmp_path: Path) -> None:
    target = _checkpoint(tmp_path / "target", 1.0)
    names = []
    for number, value in enumerate((None, 1.0, 1.0, 2.0)):
        one = Named(target)
        if value is not None:
            one.load_draft(_checkpoint(tmp_path / f"draft-{number}", value))
        one.identity.start()
        assert not one.identity.is_private
        names.append(one.digest)
    assert names[1] == names[2]
    assert len(set(names)) == 3


def test_identity_draft_model_that_changed_while_it_was_loaded_is_private(tmp_path: Path) -> None:
    one = Named(_checkpoint(tmp_path / "target", 1.0))
    folder = _checkpoint(tmp_path / "draft", 1.0)
    one.load_draft(folder)
    _checkpoint(folder, 2.0)
    one.identity.start()
    assert one.identity.is_private


def test_identity_draft_model_whose_configuration_changed_is_private(tmp_path: Path) -> None:
    one = Named(_checkpoint(tmp_path / "target", 1.0))
    folder = _checkpoint(tmp_path / "draft", 1.0)
    one.load_draft(folder)
    (folder / "config.json").write_text("{} ")
    one.identity.start()
    assert one.identity.is_private


def test_identity_update_beside_a_draft_model_is_private(tmp_path: Path) -> None:
    """The draft model may have changed as well."""
    one = Named(_checkpoint(tmp_path / "target", 1.0))
    one.load_draft(_checkpoint(tmp_path / "draft", 1.0))
    one.identity.start()
    files = file_states(_checkpoint(tmp_path / "new", 2.0).glob("*.safetensors"))
    one.identity.weights_changed(files, "auto", None)
    assert one.identity.is_private


def test_identity_unknown_config_stays_private_after_an_update(
    tmp_path: Path,
) -> None:
    one = Named(_checkpoint(tmp_path / "a", 1.0))
    (tmp_path / "a" / "generation.json").symlink_to(tmp_path / "no such file")
    one.identity.start()
    assert one.identity.is_private
    one.identity.weights_changed(file_states((tmp_path / "a").glob("*.safetensors")), "auto", None)
    assert one.identity.is_private


def test_identity_adapter_is_named_by_its_loaded_content(tmp_path: Path) -> None:
    one = Named(_checkpoint(tmp_path / "a", 1.0))
    for name, value in (("x", 1.0), ("y", 2.0), ("z", 1.0)):
        one.loaded.adapters[name] = file_states(_checkpoint(tmp_path / name, value).glob("*"))
    one.identity.start()
    found = {name: one.identity.adapter(name) for name in "xyz"}
    assert found["x"] == found["z"] != found["y"]
    assert one.identity.adapter("unknown") is None


def test_identity_pushed_adapters_are_all_different(tmp_path: Path) -> None:
    one = Named(_checkpoint(tmp_path / "a", 1.0))
    one.loaded.adapters.update(x=None, y=None)
    one.identity.start()
    assert None not in (one.identity.adapter("x"), one.identity.adapter("y"))
    assert one.identity.adapter("x") != one.identity.adapter("y")


@pytest.mark.parametrize("when", ["before", "while loading"])
@pytest.mark.parametrize("hidden", ["w13_weight", "weight_scale_inv", None])
def test_identity_update_of_a_layer_whose_tensors_lora_hides_is_private(
    tmp_path: Path, hidden: str | None, when: str
) -> None:
    """SGLang's `load_weights` skips a tensor that has another name since LoRA wraps its layer."""
    layer = torch.nn.Linear(2, 2)
    wrapped = BaseLayerWithLoRA(layer, cast(Any, None))
    one = Named(_checkpoint(tmp_path / "a", 1.0), layers=[wrapped])

    def hide() -> None:
        if hidden is not None:
            layer.register_parameter(hidden, torch.nn.Parameter(torch.ones(2)))

    if when == "before":
        hide()
    one.identity.start()
    assert not one.identity.is_private
    for value in (2.0, 3.0):
        one.identity.weights_changing()
        if when == "while loading" and value == 2.0:
            hide()
        files = file_states(_checkpoint(tmp_path / "a", value).glob("*.safetensors"))
        one.identity.weights_changed(files, "auto", None)
        assert one.identity.is_private == (hidden is not None)


def test_identity_pushed_weights_are_private_and_different(tmp_path: Path) -> None:
    one = _started(tmp_path / "a", 1.0)
    for _ in range(2):
        one.identity.weights_changed(None, None, None)
        assert one.identity.is_private
    assert len({each.digest() for each in one.published}) == 3


class TwoRanks:
    """Two ranks of one server. Each reduces in a thread of its own, as processes do."""

    def __init__(self, folder: Path) -> None:
        self._barrier = threading.Barrier(2)
        self._tensors: dict[int, torch.Tensor] = {}
        self.ranks = [Named(folder, reduce_min=partial(self._reduce_min, n)) for n in range(2)]

    def _reduce_min(self, rank: int, tensor: torch.Tensor) -> None:
        self._tensors[rank] = tensor.clone()
        self._barrier.wait(60)
        tensor.copy_(torch.minimum(self._tensors[0], self._tensors[1]))
        self._barrier.wait(60)  # before the next reduction replaces the tensors

    def poll(self) -> None:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda rank: rank.identity.poll(), self.ranks))


def test_identity_ranks_have_one_name_for_pushed_content(tmp_path: Path) -> None:
    """With MLA, each block is stored by one rank, and all ranks load it."""
    both = TwoRanks(_checkpoint(tmp_path / "a", 1.0))
    for rank in both.ranks:
        rank.loaded.adapters.update(x=None, y=None)
        rank.identity.start()
    both.poll()
    for _ in range(2):
        for rank in both.ranks:
            rank.identity.weights_changed(None, None, None)
        both.poll()
    one, other = both.ranks
    assert [each.digest() for each in one.published] == [each.digest() for each in other.published]
    assert len({each.digest() for each in one.published}) == 3
    for name in "xy":
        assert one.identity.adapter(name) == other.identity.adapter(name) is not None
    assert one.identity.adapter("x") != one.identity.adapter("y")


def test_identity_weights_that_one_rank_does_not_know_are_private_on_all(tmp_path: Path) -> None:
    """An update from disk that failed on one rank. KV of each rank depends on all weights."""
    both = TwoRanks(_checkpoint(tmp_path / "a", 1.0))
    for rank in both.ranks:
        rank.identity.start()
    both.poll()
    files = file_states(_checkpoint(tmp_path / "b", 2.0, config=False).glob("*"))
    for rank, known in zip(both.ranks, (files, None), strict=True):
        rank.identity.weights_changed(known, "auto", None)
    both.poll()
    assert [rank.identity.is_private for rank in both.ranks] == [True, True]
    assert both.ranks[0].digest == both.ranks[1].digest


@pytest.mark.parametrize(
    ("algorithm", "drafts"),
    [("EAGLE", 3), ("FROZEN_KV_MTP", 0), ("dspark", 3), ("UNO", 0), ("MINE", 3), ("NO_KV", 0)],
)
def test_weight_hooks_only_draft_models_with_kv_of_their_own_are_recorded(
    register_algorithm: Callable[..., None], algorithm: str, drafts: int
) -> None:
    """That of Gemma 4 reads the target's KV, and has a pool for show."""
    register_algorithm("MINE", has_draft_kv=True)
    register_algorithm("NO_KV", has_draft_kv=False)
    loaded = LoadedFiles()
    load = hooks_of(partial(weight_hooks.install, loaded))["load_model"]
    args = ServerArgs(model_path="/models/m", speculative_algorithm=algorithm)
    model = SimpleNamespace(model_path="/models/none", revision=None)
    for is_draft in (False, True, True, True):
        runner = SimpleNamespace(model_config=model, server_args=args, is_draft_worker=is_draft)
        assert load(lambda runner: runner, runner) is runner
    assert loaded.model_recorded
    assert len(loaded.drafts) == drafts


@pytest.mark.parametrize("is_draft", [False, True])
def test_weight_hooks_configuration_is_recorded_before_sglang_reads_it(
    tmp_path: Path, is_draft: bool
) -> None:
    """Between the read and the load of the weights, ranks wait for each other."""
    target, draft = (_checkpoint(tmp_path / name, 1.0) for name in ("target", "draft"))
    one = Named(target)
    one.loaded.configs.clear()
    one.loaded.model_recorded = False
    hooks = hooks_of(partial(weight_hooks.install, one.loaded))
    args = ServerArgs(
        model_path=str(target),
        speculative_algorithm="EAGLE",
        speculative_draft_model_path=str(draft),
    )
    for drafts in (False, True):
        folder = draft if drafts else target
        model = SimpleNamespace(model_path=str(folder), revision=None)
        worker = SimpleNamespace(server_args=args, is_draft_worker=drafts, model_config=model)
        hooks["_init_model_config"](lambda worker: None, worker)
        if drafts == is_draft:
            (folder / "config.json").write_text("{} ")
        hooks["load_model"](lambda worker: None, worker)
    one.identity.start()
    assert one.identity.is_private


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize("is_draft", [False, True])
def test_weight_hooks_weights_streamed_from_an_object_store_are_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_draft: bool, scheme: str
) -> None:
    """SGLang keeps the rest of the model in a folder, where a file may look like weights."""
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "sglang"))
    url = f"{scheme}://bucket/model"
    streamed = model_folder(Path(ObjectStorageModel.get_path(url)), LLAMA)
    Path(streamed, "model-Q4_K_M.gguf").write_bytes(b"of others")
    folder = _checkpoint(tmp_path / "local", 1.0)
    local = SimpleNamespace(model_path=str(folder), revision=None, quantization=None)
    target, draft = (local, ModelConfig(url)) if is_draft else (ModelConfig(url), local)
    args = {"load_format": "runai_streamer", "speculative_algorithm": "EAGLE"}
    one = Named(folder, model_config=target, **args)
    one.loaded.model_recorded = False
    load = hooks_of(partial(weight_hooks.install, one.loaded))["load_model"]
    for model in (target, draft):
        load(
            lambda runner: None,
            SimpleNamespace(
                server_args=one.values, is_draft_worker=model is draft, model_config=model
            ),
        )
    one.identity.start()
    assert one.identity.is_private
    one.identity.weights_changed(file_states(folder.glob("*.safetensors")), "auto", None)
    assert one.identity.is_private  # it is not known whether the files have all tensors


@pytest.fixture
def updater() -> Any:
    """SGLang's manager of weights, as far as the hooks use it. `calls` are those of the service."""
    calls: list[str] = []
    tree: Any = CakeRadixCache.__new__(CakeRadixCache)
    tree.service = SimpleNamespace(
        identity=SimpleNamespace(tensors_lost=lambda: calls.append("lost")),
        weights_changing=lambda: calls.append("changing"),
        weights_changed=lambda files, *_, idle: calls.append(f"changed {files}"),
        pool_going=lambda: calls.append("pool going"),
    )
    return SimpleNamespace(
        scheduler=SimpleNamespace(tree_cache=tree),
        is_fully_idle=lambda ignore_waiting: True,
        _session=None,
        calls=calls,
    )


@pytest.mark.parametrize("action", ["reset_tensors", "snapshot", "compare", "checksum"])
def test_weight_hooks_check_that_resets_tensors_changes_the_weights(
    updater: Any, action: str
) -> None:
    """It fills them with random numbers, also those of tensors that no file has."""
    request = SimpleNamespace(action=action)

    def original(updater: Any, request: Any) -> str:
        updater.calls.append("original")
        return action

    check = hooks_of(weight_hooks.install)["check_weights"]
    assert check(original, updater, request) == action
    resets = ["lost", "changing", "original", "changed None"]
    assert updater.calls == (resets if action == "reset_tensors" else ["original"])


@pytest.mark.parametrize(
    ("tags", "kept", "lost"),
    [
        (None, False, True),
        ([], False, True),
        (["kv_cache", "weights"], False, True),
        (["kv_cache"], False, False),
        (None, True, False),
    ],
)
def test_weight_hooks_resumed_weights_are_lost_unless_sglang_has_a_copy(
    updater: Any, tags: list[str] | None, kept: bool, lost: bool
) -> None:
    """An update from files restores neither parameters that the files lack, nor tensors that are no
    parameters, such as the weight of Llama 4's norm of queries and keys."""
    updater.scheduler.tree_cache.service.identity.keeps_weights = kept

    def original(updater: Any, request: Any) -> None:
        updater.calls.append("original")

    hook = hooks_of(weight_hooks.install)["resume_memory_occupation"]
    hook(original, updater, SimpleNamespace(tags=tags))
    resumed = ["lost", "changing", "original", "changed None"]
    assert updater.calls == (resumed if lost else ["original"])


@pytest.mark.parametrize(
    ("name", "session"), [("begin_weight_update", "open"), ("end_weight_update", None)]
)
def test_weight_hooks_refused_session_changes_nothing(
    updater: Any, name: str, session: str | None
) -> None:
    updater._session = session
    hook = hooks_of(weight_hooks.install)[name]
    assert hook(lambda *args: "refused", updater, SimpleNamespace()) == "refused"
    assert updater.calls == []


def test_weight_hooks_session_changes_the_weights(updater: Any) -> None:
    hooks = hooks_of(weight_hooks.install)

    def begin(updater: Any, request: Any) -> None:
        updater._session = "open"

    def end(updater: Any, request: Any) -> None:
        updater._session = None

    hooks["begin_weight_update"](begin, updater, SimpleNamespace())
    assert updater.calls == ["changing"]
    hooks["end_weight_update"](end, updater, SimpleNamespace())
    assert updater.calls[1:] == ["changing", "changed None"]


@pytest.mark.parametrize(
    "name", ["update_weights_from_disk", "update_weights_from_ipc", "end_weight_update"]
)
def test_weight_hooks_update_forgets_the_embeddings_of_the_old_weights(
    updater: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """SGLang's /flush_cache keeps them, and stored KV of an image would have them in it."""
    cache = MultiModalStaticCache(max_size=1 << 20)
    monkeypatch.setattr(mm_schedule, "embedding_cache", cache)
    updater.scheduler.tree_cache.service.identity.update_source = ModelSource
    updater._session = "open" if name == "end_weight_update" else None

    def original(updater: Any, request: Any) -> Any:
        assert cache.set(1, EmbeddingResult(embedding=torch.zeros(4)))  # of requests until now
        updater._session = None
        return SimpleNamespace(success=True)

    request = SimpleNamespace(model_path="/models/none", load_format="auto")
    hooks_of(weight_hooks.install)[name](original, updater, request)
    assert not cache.has(1)
    assert cache.current_size == 0


def test_weight_hooks_update_from_disk_inside_a_session_leaves_the_weights_unknown(
    updater: Any, tmp_path: Path
) -> None:
    """Tensors that are pushed later in the session come without a hook."""
    updater._session = "open"
    updater.scheduler.tree_cache.service.identity.update_source = ModelSource
    update = hooks_of(weight_hooks.install)["update_weights_from_disk"]
    request = SimpleNamespace(model_path=str(_checkpoint(tmp_path, 1.0)), load_format="auto")
    update(lambda *args: SimpleNamespace(success=True), updater, request)
    assert updater.calls == ["changing"]


@pytest.mark.parametrize("name", ["_load_lora_adapter", "_load_lora_adapter_from_tensors"])
def test_weight_hooks_adapter_that_failed_to_load_here_is_recorded_as_on_other_ranks(
    tmp_path: Path, name: str
) -> None:
    """They may have loaded it, and all ranks reduce their results together."""
    recorded: list[str] = []
    loaded = LoadedFiles(on_adapter=recorded.append)
    load = hooks_of(partial(weight_hooks.install, loaded))[name]
    ref = SimpleNamespace(lora_path=str(tmp_path / "none"), lora_id="a")
    assert not load(lambda *args: SimpleNamespace(success=False), None, ref).success
    assert recorded == ["a"]
    assert loaded.adapters == {"a": None}


def test_weight_hooks_adapter_that_stays_loaded_keeps_its_digest_over_many_loads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Digests of unloaded adapters are forgotten in its place."""
    monkeypatch.setattr(weight_hooks, "MAX_ADAPTERS", 3)
    one = _started(tmp_path / "model", 1.0)
    folder = _checkpoint(tmp_path / "adapter", 1.0)
    manager = SimpleNamespace(loras={})

    def original(manager: Any, ref: Any) -> Any:
        manager.loras[ref.lora_id] = SimpleNamespace(
            layers=[], embedding_layers={}, added_tokens_embeddings={}
        )
        return SimpleNamespace(success=True)

    load = hooks_of(partial(weight_hooks.install, one.loaded))["_load_lora_adapter"]
    ids = [f"{number}" for number in range(9)]
    for lora_id in ids:
        load(original, manager, SimpleNamespace(lora_path=str(folder), lora_id=lora_id))
        if lora_id not in ("0", "2", "4", "6"):
            del manager.loras[lora_id]
    known = [each for each in ids if one.identity.adapter(each) is not None]
    assert known == list(one.loaded.adapters) == ["0", "2", "4", "6", "8"]


def test_identity_update_after_tensors_were_lost_is_private(tmp_path: Path) -> None:
    """The files may lack tensors that have no value from a file, such as buffers."""
    one = _started(tmp_path / "a", 1.0)
    one.identity.tensors_lost()
    one.identity.weights_changed(file_states((tmp_path / "a").glob("*.safetensors")), "auto", None)
    assert one.identity.is_private


@pytest.mark.parametrize(
    ("tags", "goes"),
    [(None, True), ([], True), (["weights", "kv_cache"], True), (["weights"], False)],
)
def test_weight_hooks_released_memory_of_the_pool_goes_after_its_copies(
    updater: Any, tags: list[str] | None, goes: bool
) -> None:
    def original(updater: Any, request: Any) -> None:
        updater.calls.append("original")

    hook = hooks_of(weight_hooks.install)["release_memory_occupation"]
    hook(original, updater, SimpleNamespace(tags=tags))
    assert updater.calls == ["pool going"] * goes + ["original"]
