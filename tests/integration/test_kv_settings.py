"""Every setting of SGLang is classified by its effect on KV, and the namespace follows."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs

from sglang_cake.integration import compat
from sglang_cake.integration.identity import kv_settings
from sglang_cake.integration.support_matrix import RULES

DEFAULTS: dict[str, object] = {each.name: each.default for each in record_fields(ServerArgs)}
CLASSES = {
    *("attention", "counted", "draft", "content", "implied", "private", "rounding"),
    *("some_values", "refused", "unrelated"),
}
REVIEWED = (Path(__file__).parent / "sglang_environment.txt").read_text().split()


def _values(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**DEFAULTS, **changed})


def test_kv_facts_every_server_argument_has_a_class() -> None:
    unknown = [name for name in DEFAULTS if kv_settings.argument_class(name) not in CLASSES]
    assert not unknown, f"classify these in kv_settings.toml and docs/security.md: {unknown}"


@pytest.mark.skipif(
    compat.INSTALLED == "0.5.22",
    reason="the list has the variables of SGLang 0.5.23; others count",
)
def test_kv_facts_every_environment_variable_is_reviewed() -> None:
    names = sorted(name for name in dir(type(envs)) if name.isupper())
    assert names == REVIEWED, (
        "check whether these change KV; kv_settings.py counts variables that it does not know"
    )


@pytest.mark.parametrize("flag", ["brand_new_flag", "speculative_new", "weight_loader_new"])
def test_kv_facts_unknown_argument_counts_without_showing_its_value(flag: str) -> None:
    defaults = {**DEFAULTS, flag: None}
    assert not kv_settings.counted_arguments(_values(**{flag: None}), defaults)
    one, other = (
        kv_settings.counted_arguments(_values(**{flag: value}), defaults) for value in ("a", "b")
    )
    assert one.keys() == other.keys() == {flag}
    assert one != other
    assert one[flag] != "a"


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("quantization", "fp8"),
        ("json_model_override_args", {"rope_theta": 1.0}),
        ("model_impl", "transformers"),
        ("kt_method", "AMXINT8"),
        ("modelopt_quant", "fp8"),
        ("enable_w4a4_mxfp4_megamoe", True),
        ("enable_decoder_swa_bounded_replay", True),
        ("enable_encoder_swa_bounded_replay", True),
        ("enable_deepseek_v4_fp4_indexer", True),
        ("enable_int8_mamba_checkpoint", True),
        ("enable_mamba_cache_stochastic_rounding", True),
        ("enable_precise_embedding_interpolation", True),
        ("moe_runner_backend", "marlin"),
        ("moe_runner_backend", "lora_marlin"),
        ("fp4_gemm_runner_backend", "marlin"),
        ("moe_runner_backend", "humming"),
        ("dsa_prefill_backend", "flashmla_sparse_q8"),
        ("dsv4_prefill_backend", "flashmla_sparse_q8"),
        ("ep_dispatch_algorithm", "fake"),
    ],
)
def test_kv_facts_argument_that_changes_kv_counts(argument: str, value: Any) -> None:
    assert kv_settings.counted_arguments(_values(), DEFAULTS) == {}
    assert kv_settings.counted_arguments(_values(**{argument: value}), DEFAULTS) == {
        argument: str(value)
    }


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("host", "0.0.0.0"),
        ("port", 1),
        ("context_length", 4096),
        ("model_path", "/other"),
        ("mem_fraction_static", 0.5),
        ("chunked_prefill_size", 512),
        ("tokenizer_path", "/t"),
        ("api_key", "secret"),
        ("attention_backend", "fa3"),
        ("moe_runner_backend", "triton"),
        ("moe_runner_backend", "triton_kernel"),
        ("dsa_prefill_backend", "flashmla_sparse"),
        ("ep_dispatch_algorithm", "dynamic"),
        ("fp4_gemm_runner_backend", "flashinfer_cutlass"),
        ("mm_process_config", {"image": {"max_pixels": 1}}),
    ],
)
def test_kv_facts_argument_unrelated_to_kv_does_not_count(argument: str, value: Any) -> None:
    assert kv_settings.counted_arguments(_values(**{argument: value}), DEFAULTS) == {}


def test_kv_facts_settings_of_a_draft_model_count_for_its_kv_alone() -> None:
    values = _values(
        speculative_draft_model_quantization="fp8",
        speculative_enable_w4a4_mxfp4_megamoe=True,
        speculative_num_steps=5,
    )
    assert kv_settings.counted_arguments(values, DEFAULTS) == {}
    assert kv_settings.counted_arguments(values, DEFAULTS, frozenset({"draft"})) == {
        "speculative_draft_model_quantization": "fp8",
        "speculative_enable_w4a4_mxfp4_megamoe": "True",
    }


@pytest.mark.parametrize(
    "kernels", [{"attention_backend": "fa3"}, {"lora_backend": "triton"}], ids=str
)
def test_kv_facts_deterministic_inference_counts_the_kernels(kernels: dict[str, str]) -> None:
    assert kv_settings.counted_arguments(_values(**kernels), DEFAULTS) == {}
    promised = _values(enable_deterministic_inference=True, **kernels)
    assert kv_settings.counted_arguments(promised, DEFAULTS) == {
        "enable_deterministic_inference": "True",
        **kernels,
    }


@pytest.mark.parametrize(
    "changed",
    [
        {"load_format": "dummy"},
        {"speculative_draft_load_format": "dummy"},
        {"load_format": "npcache"},
        {"load_format": "remote_instance"},
        {"load_format": "flash_rl"},
        {"load_format": "ipc_cache"},
        {"load_format": "a.plugin.Loader"},
        {"custom_weight_loader": ["mine.load"]},
        {"weight_cache_mode": "client"},
        {"checkpoint_engine_wait_weights_before_ready": True},
        {"forward_hooks": [{"name": "h"}]},
        {"offload_mode": "meta"},
        {"ple_offload_backend": "file"},
        {"model_loader_extra_config": '{"presharded_path": "/dump"}'},
        {"model_loader_extra_config": {"qlora_adapter_name_or_path": "/a"}},
        {"model_loader_extra_config": "no json"},
    ],
    ids=str,
)
def test_kv_facts_weights_not_read_from_files_are_private(changed: dict[str, Any]) -> None:
    assert kv_settings.private_reason(_values(), DEFAULTS) is None
    assert kv_settings.private_reason(_values(**changed), DEFAULTS) is not None


@pytest.mark.parametrize(
    "changed",
    [
        {"load_format": "safetensors"},
        {"load_format": "fastsafetensors"},
        {"custom_weight_loader": []},
        {"ple_offload_embedding": True, "ple_offload_backend": "pinned", "ple_offload_dir": "/d"},
        {"model_loader_extra_config": '{"enable_multithread_load": true, "num_threads": 8}'},
        {"model_loader_extra_config": "{}"},
    ],
    ids=str,
)
def test_kv_facts_other_readers_of_the_same_files_are_not_private(changed: dict[str, Any]) -> None:
    assert kv_settings.private_reason(_values(**changed), DEFAULTS) is None


def test_kv_facts_file_formats_are_known_to_sglang() -> None:
    from sglang.srt.configs.load_config import LoadFormat

    known = {each.value for each in LoadFormat}
    assert kv_settings.FILE_FORMATS.keys() <= known


def test_kv_facts_fields_of_the_support_rules_are_refused_implied_or_counted() -> None:
    classes = {"refused", "implied", "counted"}
    assert {kv_settings.argument_class(field) for field, _, _ in RULES} <= classes


def test_kv_facts_unknown_environment_variable_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {
        "SGLANG_FP8_IGNORED_LAYERS": "lm_head",
        "SGLANG_LOG_MS": "1",
        "SGLANG_MORI_DISPATCH_DTYPE": "fp8",
        "SGLANG_MORI_COMBINE_DTYPE": "fp8",
        "SGLANG_MORI_EP_V2": "0",
        "SGLANG_FAILED_SESSION_PROBE_INTERVAL_S": "1",
        "SGLANG_CAKE_STORE": "file:///kv",
        "SGLANG_OF_TOMORROW": "s3cret",
        "ROCM_QUICK_REDUCE_QUANTIZATION": "INT4",
        "AITER_FORCE_A8W4": "1",
        "AITER_SITUV2_A8W4": "1",
        "AITER_SITUV2_A4W4": "1",
        "HOME": "/root",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = kv_settings.counted_environment(given)
    assert found.keys() == {
        "AITER_FORCE_A8W4",
        "AITER_SITUV2_A4W4",
        "AITER_SITUV2_A8W4",
        "ROCM_QUICK_REDUCE_QUANTIZATION",
        "SGLANG_FP8_IGNORED_LAYERS",
        "SGLANG_MORI_COMBINE_DTYPE",
        "SGLANG_MORI_DISPATCH_DTYPE",
        "SGLANG_OF_TOMORROW",
    }
    assert "s3cret" not in str(found)


def test_kv_facts_links_of_a_kubernetes_service_do_not_count() -> None:
    given = {
        "SGLANG_ROUTER_SERVICE_HOST": "10.96.3.4",
        "SGLANG_ROUTER_SERVICE_PORT": "8000",
        "SGLANG_ROUTER_PORT": "tcp://10.96.3.4:8000",
        "SGLANG_ROUTER_PORT_8000_TCP_ADDR": "10.96.3.4",
    }
    assert kv_settings.counted_environment(given) == {}


def test_kv_facts_environment_variable_at_its_default_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_FORCE_FP8_MARLIN", "0")
    assert kv_settings.counted_environment({"SGLANG_FORCE_FP8_MARLIN": "0"}) == {}
    monkeypatch.setenv("SGLANG_FORCE_FP8_MARLIN", "1")
    assert kv_settings.counted_environment({"SGLANG_FORCE_FP8_MARLIN": "1"})


@pytest.mark.parametrize(
    "name",
    [
        "SGLANG_DISABLE_OUTLINES_DISK_CACHE",  # SGLang sets it by an argument that does not count
        "SGLANG_ENABLE_TORCH_COMPILE",
        "SGLANG_USE_BREAKABLE_CUDA_GRAPH",
        "SGLANG_USE_CUDA_IPC_TRANSPORT",
        "SGLANG_USE_IPC_POOL_HANDLE_CACHE",
        "SGLANG_FLASHINFER_WORKSPACE_SIZE",  # by the attention backend and the model
    ],
)
def test_kv_facts_variable_that_sglang_sets_by_an_unrelated_setting_does_not_count(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("0", "1"):  # one of them is not the default
        monkeypatch.setenv(name, value)
        assert kv_settings.counted_environment({name: value}) == {}


def test_kv_facts_path_arguments_name_content_beside_the_model() -> None:
    values = _values(quantization_param_path="/scales.json", kt_weight_path="/experts")
    assert set(kv_settings.content_paths(values)) == {Path("/scales.json"), Path("/experts")}


def test_kv_facts_adapter_settings_leave_out_defaults() -> None:
    manager = _lora_manager("qkv_proj")
    assert kv_settings.adapter_settings(_values(), DEFAULTS, manager) == (
        "target_modules=['qkv_proj']"
    )
    assert "lora_strict_loading=True" in kv_settings.adapter_settings(
        _values(lora_strict_loading=True), DEFAULTS, manager
    )


def test_kv_facts_adapter_settings_have_what_sglang_infers_from_all_adapters() -> None:
    """It applies an adapter's part for experts only if one of them targets both projections."""
    alone = _lora_manager("down_proj", "o_proj")
    beside_another = _lora_manager("down_proj", "gate_up_proj", "o_proj")
    shared = _lora_manager("down_proj", "gate_up_proj", "o_proj", shares_experts=True)
    managers = (alone, beside_another, shared)
    assert len({kv_settings.adapter_settings(_values(), DEFAULTS, each) for each in managers}) == 3


def test_kv_facts_set_of_target_modules_has_one_text_in_every_process() -> None:
    """The order of a set of texts depends on the process."""
    manager = _lora_manager("v_proj", "q_proj", "o_proj", "k_proj")
    assert (
        kv_settings.adapter_settings(_values(), DEFAULTS, manager)
        == "target_modules=['k_proj', 'o_proj', 'q_proj', 'v_proj']"
    )


def _lora_manager(*modules: str, shares_experts: bool = False) -> Any:
    return SimpleNamespace(target_modules={*modules}, experts_shared_outer_loras=shares_experts)
