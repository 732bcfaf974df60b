"""What is refused, before a model is loaded and again in the scheduler."""

import ast
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv_pools import deepseek_v4, deepseek_v4_online, since_0_5_23
from sglang.srt.configs.model_config import ModelImpl
from sglang.srt.environ import envs
from sglang.srt.models import transformers
from warm import run_forked

from sglang_cake.config import CakeConfig
from sglang_cake.core.codec_names import CHOICES, LOSSY
from sglang_cake.core.errors import ConfigError
from sglang_cake.integration import support_matrix
from sglang_cake.integration.identity.identity import LoadedDraft, ModelSource
from sglang_cake.integration.support_matrix import (
    FAMILIES,
    MEDIA,
    REFUSED,
    RULES,
    SPECULATION,
    ModelTraits,
    batch_rope_tokens,
    check_context,
    unsupported,
    unsupported_codec,
    unsupported_drafts,
    unsupported_group,
    unsupported_head_groups,
    unsupported_pools,
    unsupported_vectors,
)

PLAIN = ModelTraits()


def _args(**changes: Any) -> SimpleNamespace:
    """The fields of SGLang's ServerArgs that matter, as they are by default."""
    fields: dict[str, Any] = {
        "device": None,
        "disable_radix_cache": False,
        "chunked_prefill_size": None,
        "disaggregation_mode": "null",
        "enable_pd_role_switch": False,
        "disaggregation_decode_enable_radix_cache": False,
        "disaggregation_decode_enable_offload_kvcache": False,
        "encoder_only": False,
        "language_only": False,
        "pp_size": 1,
        "attn_cp_size": 1,
        "dcp_size": 1,
        "speculative_algorithm": None,
        "enable_encoder_swa_bounded_replay": False,
        "enable_unified_memory": False,
        "enable_mis": False,
        "enable_deterministic_inference": False,
        "enable_mixed_chunk": False,
        "enable_hisparse": False,
        "enable_pdmux": False,
        "dllm_algorithm": None,
        "enable_hierarchical_cache": False,
        "enable_lmcache": False,
        "enable_flexkv": False,
        "enable_unified_cache_external_linker": False,
        "enable_kv_cache_sharding": False,
        "prefill_only_disable_kv_cache": False,
        "enable_return_routed_experts": False,
        "enable_return_indexer_topk": False,
        "kv_canary": "none",
        "enable_streaming_session": False,
        "page_size": None,
    }
    assert set(changes) <= set(fields)
    return SimpleNamespace(**fields | changes)


TESTS = Path(__file__).parents[1]


def _named(source: str) -> set[str]:
    """The functions of a file of tests, and the keys of its tables."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            found |= {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    return found


HYBRIDS = "e2e/test_hybrids.py"
FAMILIES_FILE = "e2e/test_hybrid_families.py"
MULTIMODAL = "e2e/test_multimodal.py::test_multimodal"
MEDIA_MODELS = "e2e/test_media_models.py"
SPECULATING = "e2e/test_speculation.py"
POOLING = (
    "e2e/test_pooling.py::test_pooling_server_vectors_and_scores_are_equal_before_and_after_a_load"
)
COMPRESSED = "radix/test_radix_compressed.py::test_radix_compressed"
PLANES = "integration/test_pool_planes.py"
ENDS = "radix/test_radix_ends.py::test_radix_ends_random_calls_keep_kv_and_slot_counts_right"
# The tests of the rows of README's tables, by model: a file, and in it a function or a key of a
# table. A file of `e2e` runs the model in a server.
PROOFS: dict[str, dict[str, str]] = {
    "MHA, GQA": {
        "Llama": "e2e/test_exactness.py::test_stored_prompt_of_any_length_gives_the_plain_answer",
    },
    "MLA": {"DeepSeek V2": "e2e/test_matrix.py::test_mla_model_stored_answer_equals_cold"},
    "multimodal, requests of text": {
        "Qwen3-VL": f"{MULTIMODAL}_prompt_of_text_is_loaded_and_gives_the_plain_answer",
    },
    MEDIA: {
        "Qwen3-VL": f"{MULTIMODAL}_prompt_with_images_is_loaded_and_gives_the_plain_answer",
        "Qwen3-VL with a video": f"{MULTIMODAL}_video_is_loaded_and_no_other_video_is_taken_for_it",
        "Qwen3.5": f"{FAMILIES_FILE}"
        "::test_family_prompt_with_an_image_is_loaded_and_no_other_image_is_taken_for_it",
        "Qwen2.5-VL¹": f"{MEDIA_MODELS}::qwen2.5-vl",
        "GLM-4.1V": f"{MEDIA_MODELS}::glm-4.1v",
    },
    "embeddings, rewards and classes, of the last token": {
        "Llama": POOLING,
        "Llama of the Transformers backend": POOLING,
    },
    "compressed attention": {
        "DeepSeek V4": f"{COMPRESSED}_end_attached_to_a_request_serves_the_rest",
        "DeepSeek V4 with online sums": f"{COMPRESSED}"
        "_sums_of_a_request_are_empty_where_a_block_ends",
        "DeepSeek V4.1": f"{COMPRESSED}_end_attached_to_a_request_serves_the_rest",
        "DeepSeek V4.1 with bounded replay": f"{COMPRESSED}"
        "_prompt_computes_the_last_window_of_a_replay",
        "DeepSeek V4.1 with windows of requests": "integration/test_coordinator_trees.py"
        "::test_coordinator_trees_running_prompt_meets_what_has_landed",
        "the same with DSPARK": "integration/test_draft_ring.py"
        "::test_draft_ring_after_loaded_blocks_has_rows_of_the_same_tokens_alone",
    },
    "sliding windows in a pool of their own": {
        "gpt-oss¹": f"{FAMILIES_FILE}::gpt-oss",
        "Gemma 4¹": f"{FAMILIES_FILE}::gemma-4",
        "Llama 4¹": f"{FAMILIES_FILE}::llama-4",
        "MiMo V2¹": f"{FAMILIES_FILE}::mimo-v2",
        "Step 3.5¹": f"{FAMILIES_FILE}::step-3.5",
        "Mellum": f"{HYBRIDS}::windows-both",
    },
    "Mamba and linear attention": {
        "Qwen3-Next": f"{HYBRIDS}::states-both",
        "Qwen3.5": f"{FAMILIES_FILE}::qwen3.5",
        "Kimi Linear": f"{FAMILIES_FILE}::kimi-linear-2-ranks",
        "Nemotron-H¹": f"{FAMILIES_FILE}::nemotron-h",
        "Granite 4¹": f"{FAMILIES_FILE}::granite-4",
        "Falcon-H1¹": f"{FAMILIES_FILE}::falcon-h1",
        "LFM2¹": f"{FAMILIES_FILE}::lfm2",
    },
    "sliding windows and states together": {"pools of both": ENDS},
    "sparse attention with an index": {
        "DSA": f"{PLANES}::dsa",
        "DSA with a pooled index": f"{PLANES}::dsa, a pooled index",
        "MiniMax M3": f"{PLANES}::minimax",
    },
    "sparse attention with a compressed index, beside linear attention": {
        "QSA": f"{PLANES}::qsa",
        "QSA in a tree with states": ENDS,
    },
    "n-gram embeddings": {
        "LongCat-Flash-Lite's table": "radix/test_radix_ngrams.py"
        "::test_radix_ngrams_loaded_part_between_two_chunks_gives_the_ngrams_of_computing",
    },
    "NGRAM": {
        "Llama": f"{SPECULATING}::ngram-both",
        "Mellum¹": f"{SPECULATING}::ngram-windows-both",
        "Qwen3-Next¹": f"{SPECULATING}::ngram-states-load",
    },
    "STANDALONE": {
        "Mellum": f"{SPECULATING}::standalone-windows-load",
        "Qwen3-Next¹": f"{SPECULATING}::standalone-states-load",
    },
    "EAGLE": {"Llama": f"{SPECULATING}::eagle-both"},
    "EAGLE3": {
        "Llama": f"{SPECULATING}::eagle3-load",
        "Qwen3-Next¹": f"{SPECULATING}::eagle3-states-load",
    },
    "NEXTN": {
        "MiMo¹": f"{SPECULATING}::mtp-load",
        "Qwen3-Next": f"{SPECULATING}::mtp-states-both",
    },
    "FROZEN_KV_MTP": {
        "a draft model without KV": "integration/test_identity.py"
        "::test_weight_hooks_only_draft_models_with_kv_of_their_own_are_recorded",
    },
    "DFLASH": {"Llama": f"{SPECULATING}::dflash-load"},
    "DSPARK": {"draft layers": "integration/test_kv_pool.py::DFLASH"},
    "UNO": {
        "SGLang's worker": "integration/test_uno.py"
        "::test_uno_accepted_tokens_have_the_kv_of_the_model_alone",
    },
}


README = (TESTS.parent / "README.md").read_text().partition("## Reference: models")[2]


def _cells(name: str) -> list[str]:
    """The other cells of a row of README's tables."""
    (row,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", README, re.M)
    return str(row).split(" | ")


@pytest.mark.parametrize("name", PROOFS)
def test_support_matrix_proofs_are_tests_that_exist(name: str) -> None:
    proofs = PROOFS[name]
    (in_server,) = {test.startswith("e2e/") for test in proofs.values()}
    how = "server" if in_server else "components"
    assert _cells(name)[-2] == f"{how} on a CPU: {', '.join(proofs)}"
    for model, test in proofs.items():
        file, _, function = test.partition("::")
        source = (TESTS / file).read_text()
        assert function in _named(source), test
        if "hybrid" in file:
            builder = re.sub("[^a-z0-9]", "_", model.removesuffix("¹").lower())
            assert re.search(rf"^(    |from .*)\bbuild_{builder}\b", source, re.M), (
                model
            )  # imported


def test_support_matrix_rows_are_those_of_readme() -> None:
    assert set(PROOFS) == {*(row.name for row in FAMILIES), *SPECULATION}
    for row in FAMILIES:
        assert _cells(row.name)[-2].replace("¹", "") == row.proven
    for name, has_draft_kv in SPECULATION.items():
        assert (_cells(name)[0] != "nothing") == has_draft_kv, name
    for reason in REFUSED.values():
        assert len(_examples(reason)) > 0


def _examples(reason: str) -> list[str]:
    """The models that README names for a reason of REFUSED."""
    (examples,) = re.findall(rf"^- (.*): {re.escape(reason)}$", README, re.M)
    return str(examples).split(", ")


@since_0_5_23
def test_support_matrix_proofs_of_breadth_are_those_that_make_test_leaves_out(
    tmp_path: Path,
) -> None:
    proofs = [each for models in PROOFS.values() for each in models.items()]
    proofs = [(m, test) for m, test in proofs if test.startswith("e2e/") or m.endswith("¹")]
    files = {TESTS / test.partition("::")[0] for _, test in proofs}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not breadth"]
    command += map(str, files)
    done = run_forked(command, os.environ, tmp_path, timeout_s=300)
    assert done.returncode == 0, done.stdout
    collected = [line.partition("tests/")[2] for line in done.stdout.splitlines()]
    for model, test in proofs:
        file, _, name = test.partition("::")
        found = [each for each in collected if each.startswith(f"{file}::") and name in each]
        assert model.endswith("¹") == (not found), test


def test_support_matrix_names_of_tests_in_a_file_are_functions_and_keys() -> None:
    source = 'KINDS = {"a": 1}\nMORE: dict[str, int] = {"b": 2}\ndef test_c(): pass\nnot_d = "d"\n'
    assert _named(source) == {"a", "b", "test_c"}


def test_support_matrix_defaults_are_supported() -> None:
    assert unsupported(_args(), None, 128) is None
    assert unsupported(_args(page_size=1, chunked_prefill_size=512), PLAIN, 128) is None
    assert unsupported(_args(disaggregation_mode="prefill"), PLAIN, 128) is None


# A prefill server that may become a decode server.
ROLE_SWITCH = {"disaggregation_mode": "prefill", "enable_pd_role_switch": True}


@pytest.mark.parametrize("changes", [{"disaggregation_mode": "decode"}, ROLE_SWITCH])
def test_support_matrix_decode_server_needs_a_radix_cache_and_no_windows(
    changes: dict[str, Any],
) -> None:
    args = _args(**changes)
    assert "--disaggregation-decode-enable-radix-cache" in str(unsupported(args, PLAIN, 128))
    args.disaggregation_decode_enable_radix_cache = True
    assert unsupported(args, PLAIN, 128) is None
    assert unsupported(args, replace(PLAIN, is_hybrid_ssm=True), 128) is None
    reason = str(unsupported(args, replace(PLAIN, is_hybrid_swa=True), 128))
    assert "on a decode server" in reason
    assert "\n" not in reason


def test_support_matrix_role_switch_without_disaggregation_needs_nothing_more() -> None:
    args = _args(enable_pd_role_switch=True)  # SGLang refuses to switch such a server
    assert unsupported(args, replace(PLAIN, is_hybrid_swa=True), 128) is None


def test_support_matrix_server_with_encoders_elsewhere_is_served() -> None:
    args = _args(language_only=True)
    assert unsupported(args, replace(PLAIN, is_multimodal=True), 128) is None


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_support_matrix_draft_model_on_disaggregated_servers_is_served(mode: str) -> None:
    args = _args(disaggregation_mode=mode, disaggregation_decode_enable_radix_cache=True)
    for algorithm in ("NGRAM", "EAGLE"):
        args.speculative_algorithm = algorithm
        assert unsupported(args, PLAIN, 128) is None


NGRAM_TABLE = replace(PLAIN, is_ngram=True, is_ngram_table=True)
DECODE = {"disaggregation_mode": "decode", "disaggregation_decode_enable_radix_cache": True}


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"enable_mixed_chunk": True}, "remove --enable-mixed-chunk"),
        ({"speculative_algorithm": "NGRAM"}, "remove --speculative-algorithm"),
        (DECODE, "prefill servers may have it"),
        (DECODE | ROLE_SWITCH, "prefill servers may have it"),
    ],
)
def test_support_matrix_ngram_table_is_refused_where_sglang_does_not_fill_it(
    changes: dict[str, Any], advice: str
) -> None:
    reason = unsupported(_args(**changes), NGRAM_TABLE, 128)
    assert reason is not None
    assert advice in reason
    assert "\n" not in reason
    assert unsupported(_args(**changes), replace(PLAIN, is_ngram=True), 128) is None  # hashes
    assert unsupported(_args(), NGRAM_TABLE, 128) is None
    assert unsupported(_args(disaggregation_mode="prefill"), NGRAM_TABLE, 128) is None


def _rope(context_tokens: int, **config: Any) -> int | None:
    text = SimpleNamespace(**{"max_position_embeddings": 131072} | config)
    model: Any = SimpleNamespace(hf_text_config=text, context_len=context_tokens)
    model._resolved_model_impl = config.get("impl", ModelImpl.SGLANG)
    return batch_rope_tokens(model)


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic"}, "max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("context_tokens", "config", "refused_above"),
    [
        (131072, {"rope_parameters": LONGROPE}, 4096),
        (4097, {"rope_parameters": LONGROPE}, 4096),
        (4096, {"rope_parameters": LONGROPE}, None),  # no forward is ever longer than the original
        (131072, {"rope_parameters": {"full_attention": LONGROPE}}, 4096),
        (131072, {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 1}, 1),
        (131072, {"rope_scaling": {"type": "longrope"}}, None),
        (131072, {"rope_parameters": {"rope_type": "yarn"}}, None),
        (8192, DYNAMIC, None),
        (8192, DYNAMIC | {"impl": ModelImpl.TRANSFORMERS}, 4096),
        (4096, DYNAMIC | {"impl": ModelImpl.TRANSFORMERS}, None),
        (131072, {"rope_scaling": None}, None),
    ],
)
def test_support_matrix_rope_that_depends_on_the_batch_is_refused(
    context_tokens: int, config: dict[str, Any], refused_above: int | None
) -> None:
    tokens = _rope(context_tokens, **config)
    assert tokens == refused_above
    reason = unsupported(_args(), replace(PLAIN, batch_rope_tokens=tokens), 128)
    assert (reason is None) == (refused_above is None)
    assert reason is None or f"--context-length {refused_above}" in reason


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "xpu"),
        ("device", "npu"),
        ("disable_radix_cache", True),
        ("disaggregation_decode_enable_offload_kvcache", True),
        ("encoder_only", True),
        ("pp_size", 2),
        ("attn_cp_size", 2),
        ("dcp_size", 2),
        ("enable_mis", True),
        ("speculative_algorithm", "MY_PLUGIN"),
        ("enable_hisparse", True),
        ("enable_pdmux", True),
        ("dllm_algorithm", "LowConfidence"),
        ("enable_hierarchical_cache", True),
        ("enable_lmcache", True),
        ("enable_flexkv", True),
        ("enable_unified_cache_external_linker", True),
        ("enable_kv_cache_sharding", True),
        ("prefill_only_disable_kv_cache", True),
        ("kv_canary", "log"),
        ("kv_canary", "raise"),
        ("enable_streaming_session", True),
    ],
)
def test_support_matrix_unsupported_setting_is_refused_by_flag_name(
    field: str, value: object
) -> None:
    reason = unsupported(_args(**{field: value}), None, 128)
    assert reason is not None
    assert reason.startswith("cake ")
    assert f"--{field.replace('_', '-')}" in reason
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("algorithm", "flag"),
    [
        (None, "enable_unified_memory"),
        ("DFLASH", "enable_unified_memory"),
        (None, "enable_encoder_swa_bounded_replay"),
        ("DSPARK", "enable_encoder_swa_bounded_replay"),
    ],
)
def test_support_matrix_memory_of_several_pools_is_served_also_beside_drafts(
    algorithm: str | None, flag: str
) -> None:
    args = _args(**{flag: True, "speculative_algorithm": algorithm})
    assert unsupported(args, PLAIN, 128) is None


@pytest.mark.parametrize("has_draft_kv", [False, True])
def test_support_matrix_algorithm_of_a_plugin_is_served_as_it_was_registered(
    register_algorithm: Callable[..., None], has_draft_kv: bool
) -> None:
    args = _args(speculative_algorithm="Mine")
    assert "what this speculative algorithm keeps" in str(unsupported(args, None, 128))
    register_algorithm("MINE", has_draft_kv=has_draft_kv)
    assert unsupported(args, PLAIN, 128) is None
    runner: Any = SimpleNamespace(req_to_token_pool=None)
    draft = LoadedDraft(runner, ModelSource("d"), None)
    seen, unseen = [draft] if has_draft_kv else [], [] if has_draft_kv else [draft]
    assert unsupported_drafts(args, seen, None) is None
    assert "did not see the draft model of Mine" in str(unsupported_drafts(args, unseen, None))


def test_support_matrix_radix_cache_that_sglang_turned_off_is_no_flag_to_change() -> None:
    args = _args(disable_radix_cache=True)
    reason = str(unsupported(args, PLAIN, 128))
    assert "which SGLang turns off for this model: remove --enable-cake" in reason
    args.enable_deterministic_inference = True
    assert "--enable-deterministic-inference" in str(unsupported(args, PLAIN, 128))


@pytest.mark.parametrize(
    ("page_size", "block_tokens", "advice"),
    [(96, 128, 96), (48, 128, 144), (256, 128, 256), (64, 100, 128)],
)
def test_support_matrix_block_of_partial_pages_is_refused_with_advice(
    page_size: int, block_tokens: int, advice: int
) -> None:
    reason = unsupported(_args(page_size=page_size), PLAIN, block_tokens)
    assert reason is not None
    assert reason.endswith(f"--cake-block-tokens {advice}")
    assert unsupported(_args(page_size=page_size), PLAIN, advice) is None


@pytest.mark.parametrize(
    "facts",
    [
        replace(PLAIN, is_encoder_decoder=True),
        replace(PLAIN, is_generation=False),
    ],
)
def test_support_matrix_model_kind_is_named_before_forced_settings(facts: ModelTraits) -> None:
    reason = unsupported(_args(disable_radix_cache=True), facts, 128)
    assert reason is not None
    assert reason.startswith("cake does not support ")
    assert "--disable-radix-cache" not in reason


def test_support_matrix_embedding_model_of_the_last_token_is_served() -> None:
    traits = replace(PLAIN, is_generation=False, pools_last_token=True)
    assert unsupported(_args(), traits, 128) is None


def test_support_matrix_embedding_model_with_a_draft_model_is_refused() -> None:
    """Its KV of prompts would be found by a server that generates text."""
    judge = replace(PLAIN, is_generation=False, pools_last_token=True)
    drafting = _args(speculative_algorithm="STANDALONE")
    assert "computes no drafts" in str(unsupported(drafting, judge, 128))
    assert unsupported(drafting, PLAIN, 128) is None
    assert unsupported(_args(speculative_algorithm="NGRAM"), judge, 128) is None


@pytest.mark.parametrize("is_causal", [True, False])
def test_support_matrix_embedding_model_that_sees_later_tokens_is_refused_when_loaded(
    monkeypatch: pytest.MonkeyPatch, is_causal: bool
) -> None:
    """What SGLang makes of a model of the Transformers backend."""
    monkeypatch.setattr(transformers, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    sizes = {"num_attention_heads": 2, "hidden_size": 8, "sliding_window": None}
    config, layer = SimpleNamespace(**sizes), torch.nn.Module()
    layer.is_causal = is_causal
    parts = {"config": config, "text_config": config, "quant_config": None}
    parts |= {"model": torch.nn.Sequential(layer), "start_layer": 0, "end_layer": 1}
    loaded = SimpleNamespace(**parts)
    create = transformers.TransformersEmbeddingModel._create_attention_instances
    loaded.attention_instances = create(loaded)
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=loaded))
    traits = replace(PLAIN, is_generation=False, pools_last_token=True)
    reason = unsupported_vectors(traits, worker)
    assert reason is None if is_causal else "see later tokens" in str(reason)
    assert unsupported_vectors(PLAIN, worker) is None


def _context(**changes: Any) -> Any:
    params = {"disable": False, "page_size": 1}
    fields: dict[str, Any] = {
        "disable_radix_cache": False,
        "is_hybrid_swa": False,
        "is_hybrid_ssm": False,
    }
    params |= {name: changes.pop(name) for name in list(changes) if name in params}
    assert set(changes) <= set(fields)
    return SimpleNamespace(**fields | changes, params=SimpleNamespace(**params))


@pytest.mark.parametrize(
    "changes",
    [
        {"disable_radix_cache": True},
        {"disable": True},
    ],
)
def test_support_matrix_unsupported_scheduler_context_is_one_line(changes: dict[str, Any]) -> None:
    pytest.importorskip("sglang")
    with pytest.raises(ConfigError, match=r"^cake [^\n]+$"):
        check_context(_context(**changes), CakeConfig())


def _pools(**changes: Any) -> Any:
    """The context of a model with both kinds of end states, and the pools that SGLang makes."""
    swa = pytest.importorskip("sglang.srt.mem_cache.allocator.swa").SWATokenToKVPoolAllocator
    memory = pytest.importorskip("sglang.srt.mem_cache.memory_pool")
    windows = pytest.importorskip("sglang.srt.mem_cache.swa_memory_pool").SWAKVPool
    allocator = swa.__new__(swa)
    allocator._kvcache = windows.__new__(windows)
    states = memory.HybridReqToTokenPool.__new__(memory.HybridReqToTokenPool)
    states.mamba_ckpt_pool = None
    states.mamba_pool = SimpleNamespace(replayssm_spec_write_pos=None)
    states.enable_mamba_extra_buffer = False
    params = {
        "token_to_kv_pool_allocator": allocator,
        "req_to_token_pool": states,
        "swa_gates_prefix_match": True,
    }
    assert set(changes) <= set(params)
    return SimpleNamespace(
        is_hybrid_swa=True, is_hybrid_ssm=True, params=SimpleNamespace(**params | changes)
    )


def test_support_matrix_pools_of_end_states_are_supported() -> None:
    assert unsupported_pools(_pools(), CakeConfig()) is None
    assert unsupported_pools(_pools(), CakeConfig(codec="zstd")) is None


def test_support_matrix_pools_of_end_states_in_one_memory_are_supported() -> None:
    ctx = _pools()
    states, allocator = ctx.params.req_to_token_pool, ctx.params.token_to_kv_pool_allocator
    memory = pytest.importorskip("sglang.srt.mem_cache.unified_memory_pool")
    allocators = pytest.importorskip("sglang.srt.mem_cache.allocator.unified_hybrid_swa")
    ctx.params.req_to_token_pool = memory.UnifiedHybridReqToTokenPool.__new__(
        memory.UnifiedHybridReqToTokenPool
    )
    vars(ctx.params.req_to_token_pool).update(vars(states))
    for kind in (
        allocators.UnifiedSWATokenToKVPoolAllocator,
        allocators.UnifiedMambaSWATokenToKVPoolAllocator,
    ):
        unified = ctx.params.token_to_kv_pool_allocator = kind.__new__(kind)
        vars(unified).update(vars(allocator))
        unified._kvcache = memory.UnifiedSWAKVPool.__new__(memory.UnifiedSWAKVPool)
        assert unsupported_pools(ctx, CakeConfig()) is None


def test_support_matrix_states_in_the_pool_of_a_decode_server_are_supported() -> None:
    decode = pytest.importorskip("sglang.srt.disaggregation.decode")
    pool = decode.HybridMambaDecodeReqToTokenPool
    ctx = _pools()
    states = pool.__new__(pool)
    vars(states).update(vars(ctx.params.req_to_token_pool))
    ctx.params.req_to_token_pool = states
    assert unsupported_pools(ctx, CakeConfig()) is None
    states.mamba_ckpt_pool = object()
    assert "--enable-int8-mamba-checkpoint" in str(unsupported_pools(ctx, CakeConfig()))


@pytest.mark.parametrize("codec", LOSSY)
def test_support_matrix_lossy_codec_with_end_states_is_refused(codec: str) -> None:
    reason = unsupported_pools(_pools(), CakeConfig(codec=codec))
    assert reason is not None
    assert "--cake-codec raw or zstd" in reason


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"token_to_kv_pool_allocator": object()}, "in a object"),
        ({"swa_gates_prefix_match": False}, "remove --enable-encoder-swa-bounded-replay"),
        ({"req_to_token_pool": object()}, "in a object"),
    ],
)
def test_support_matrix_other_pools_of_end_states_are_refused(
    changes: dict[str, Any], advice: str
) -> None:
    reason = unsupported_pools(_pools(**changes), CakeConfig())
    assert reason is not None
    assert reason.startswith("cake does not support ")
    assert advice in reason
    assert "\n" not in reason


def _compressed(make: Callable[..., Any] = deepseek_v4, **changes: Any) -> Any:
    """The context of a DeepSeek V4, with its pool as SGLang makes it on a CPU."""
    pool = make(1024)
    for name, value in changes.items():
        setattr(pool, name, value)
    ctx = _pools()
    ctx.params.token_to_kv_pool_allocator._kvcache = pool
    ctx.params.page_size, ctx.params.sliding_window_size = 256, 128
    return ctx


@since_0_5_23
@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, None),
        ({"swa_page_size": 64}, "SGLANG_OPT_SM120_DIRECT_SWA_KV"),
    ],
)
@pytest.mark.parametrize("make", [deepseek_v4, deepseek_v4_online])
def test_support_matrix_forms_of_compressed_pools_are_refused_by_what_helps(
    make: Callable[..., Any], changes: dict[str, Any], advice: str | None
) -> None:
    reason = unsupported_pools(_compressed(make, **changes), CakeConfig())
    assert (reason is None) == (advice is None)
    assert reason is None or (str(advice) in reason and "\n" not in reason)


def test_support_matrix_states_of_other_forms_are_refused_by_flag_name() -> None:
    int8, lagging = _pools(), _pools()
    int8.params.req_to_token_pool.mamba_ckpt_pool = object()
    pool = lagging.params.req_to_token_pool.mamba_pool
    pool.replayssm_spec_write_pos = object()
    pool.mamba_cache = SimpleNamespace(temporal=torch.zeros(1))
    assert "--enable-int8-mamba-checkpoint" in str(unsupported_pools(int8, CakeConfig()))
    reason = str(unsupported_pools(lagging, CakeConfig()))
    assert "set --mamba-radix-cache-strategy extra_buffer" in reason
    assert "--mamba-ssm-dtype bfloat16" in reason
    pool.mamba_cache.temporal = torch.zeros(1, dtype=torch.bfloat16)
    assert unsupported_pools(lagging, CakeConfig()) is None
    pool.mamba_cache.temporal = torch.zeros(1)
    lagging.params.req_to_token_pool.enable_mamba_extra_buffer = True  # keeps other states
    assert unsupported_pools(lagging, CakeConfig()) is None


def _graphs(backend: str) -> dict[str, Any]:
    prefill = SimpleNamespace(backend=backend)
    return {"cuda_graph_config": SimpleNamespace(prefill=prefill)}


# A server on a CPU that can be a member, and what is different on a GPU.
MEMBER = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "prefill_attention_backend": None,
    "tp_size": 1,
    "dp_size": 1,
    "disaggregation_mode": "null",
    "speculative_algorithm": None,
    "enable_deterministic_inference": False,
} | _graphs("disabled")
GPU = {"device": "cuda", "attention_backend": "flashinfer"}


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"device": "xpu"}, "--device cpu or cuda"),
        ({"attention_backend": "intel_amx"}, "--attention-backend torch_native"),
        ({"prefill_attention_backend": "intel_amx"}, "--attention-backend torch_native"),
        ({"speculative_algorithm": "NGRAM"}, "remove --speculative-algorithm"),
        ({"tp_size": 2}, "set --tp-size 1"),
        ({"dp_size": 2}, "set --dp-size 1"),
        ({"disaggregation_mode": "prefill"}, "remove --disaggregation-mode"),
        (GPU | {"attention_backend": "fa3"}, "--attention-backend flashinfer"),
        (GPU | {"attention_backend": "torch_native"}, "--attention-backend flashinfer"),
        (GPU | _graphs("breakable"), "prefill CUDA graphs"),
        (GPU | _graphs("full"), "prefill CUDA graphs"),
        (GPU | {"tp_size": 2}, "set --tp-size 1"),
        (
            GPU
            | {
                "attention_backend": "triton",
                "prefill_attention_backend": "flashinfer",
                "enable_deterministic_inference": True,
            },
            "--enable-deterministic-inference: remove it",
        ),
    ],
)
def test_support_matrix_server_that_cannot_be_a_runahead_member_is_refused(
    changes: dict[str, Any], advice: str
) -> None:
    member = CakeConfig(runahead_peers="a:1,b:1")
    args = SimpleNamespace(**MEMBER | changes)
    reason = unsupported_group(args, PLAIN, member)
    assert reason is not None
    assert advice in reason
    assert "\n" not in reason
    assert unsupported_group(args, PLAIN, CakeConfig()) is None


@pytest.mark.parametrize("device", [{}, GPU])
def test_support_matrix_runahead_member_on_cpu_or_gpu_is_supported(device: dict[str, Any]) -> None:
    member = CakeConfig(runahead_peers="a:1,b:1")
    args = SimpleNamespace(**MEMBER | device)
    assert unsupported_group(args, PLAIN, member) is None
    for kind in ("is_hybrid_swa", "is_hybrid_ssm"):
        assert unsupported_group(args, replace(PLAIN, **{kind: True}), member) is not None
    reason = unsupported_group(args, replace(PLAIN, is_mla=True), member)
    assert (reason is not None) == bool(device)
    between = replace(member, runahead_transport="cuda-ipc")
    reason = unsupported_group(args, PLAIN, between)
    assert (reason is not None) == (not device)


TWO_RANKS = SimpleNamespace(
    tp_size=2, dp_size=1, enable_dp_attention=False, enable_deterministic_inference=False
)


@pytest.mark.parametrize(
    ("groups", "changes", "kind", "advice"),
    [
        (3, {}, "", "set 2, or a multiple"),
        (1, {}, "", "set 2, or a multiple"),
        (2, {"tp_size": 4}, "", "set 4, or a multiple"),
        (4, {"enable_deterministic_inference": True}, "", "set --cake-head-groups 2"),
        (4, {}, "is_hybrid_swa", "set --cake-head-groups 2"),
        (4, {}, "is_hybrid_ssm", "set --cake-head-groups 2"),
    ],
)
def test_support_matrix_head_groups_that_cannot_be_are_refused(
    groups: int, changes: dict[str, Any], kind: str, advice: str
) -> None:
    args = SimpleNamespace(**vars(TWO_RANKS) | changes)
    model = replace(PLAIN, **{kind: True}) if kind else PLAIN
    reason = unsupported_head_groups(args, model, CakeConfig(head_groups=groups))
    assert reason is not None
    assert advice in reason
    assert "\n" not in reason
    assert unsupported_head_groups(args, model, CakeConfig()) is None


def test_support_matrix_head_groups_that_ranks_divide_are_supported() -> None:
    for groups in (2, 4, 8):
        config = CakeConfig(head_groups=groups)
        assert unsupported_head_groups(TWO_RANKS, PLAIN, config) is None
    attention = SimpleNamespace(
        **vars(TWO_RANKS) | {"tp_size": 8, "dp_size": 4, "enable_dp_attention": True}
    )
    assert unsupported_head_groups(attention, PLAIN, CakeConfig(head_groups=2)) is None
    same = replace(PLAIN, is_hybrid_swa=True)
    assert unsupported_head_groups(TWO_RANKS, same, CakeConfig(head_groups=2)) is None
    latent = replace(PLAIN, is_mla=True)
    assert unsupported_head_groups(TWO_RANKS, latent, CakeConfig(head_groups=3)) is None


@pytest.mark.parametrize(
    "traits",
    [
        replace(PLAIN, is_multimodal=True),
        replace(PLAIN, is_generation=False, pools_last_token=True),
    ],
)
def test_support_matrix_runahead_member_of_a_multimodal_or_embedding_model_is_refused(
    traits: ModelTraits,
) -> None:
    member = CakeConfig(runahead_peers="a:1,b:1")
    reason = unsupported_group(SimpleNamespace(**MEMBER), traits, member)
    assert reason is not None
    assert "does not support multimodal and embedding models" in reason
    assert "\n" not in reason


def _cache(dtype: str, algorithm: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_dtype=dtype, speculative_algorithm=algorithm)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "mxfp8", "nvfp4", "fp4_mx_block16"])
def test_support_matrix_lossy_codec_on_a_cache_of_few_bits_is_refused(dtype: str) -> None:
    for codec in CHOICES:
        config = CakeConfig(codec=codec)
        reason = unsupported_codec(_cache(dtype), PLAIN, config)
        assert (reason is not None) == (codec in LOSSY)
        assert reason is None or (f"--kv-cache-dtype {dtype}" in reason and "\n" not in reason)
        for wider in ("auto", "bfloat16"):
            assert unsupported_codec(_cache(wider), PLAIN, config) is None
    bounded = CakeConfig(codec="auto", max_error=0.01)  # it takes zstd then
    assert unsupported_codec(_cache(dtype), PLAIN, bounded) is None


def test_support_matrix_sparse_attention_is_served_without_lossy_codecs_and_groups() -> None:
    sparse = replace(PLAIN, is_sparse=True)
    assert unsupported(_args(page_size=64), sparse, 128) is None
    args = _cache("auto")
    for codec in CHOICES:
        reason = unsupported_codec(args, sparse, CakeConfig(codec=codec))
        assert (reason is not None) == (codec in LOSSY)
        assert reason is None or ("an index" in reason and "\n" not in reason)
    group = CakeConfig(runahead_peers="a:1,b:1")
    for model in (sparse, NGRAM_TABLE):
        reason = unsupported_group(SimpleNamespace(**MEMBER), model, group)
        assert reason is not None
        assert "an index or of n-grams" in reason


@pytest.mark.parametrize(("algorithm", "has_draft_kv"), SPECULATION.items())
def test_support_matrix_draft_kv_is_served_with_end_states_and_without_lossy_codecs(
    algorithm: str, has_draft_kv: bool
) -> None:
    for name in (algorithm, algorithm.lower()):
        args = _args(speculative_algorithm=name)
        assert unsupported(args, PLAIN, 128) is None
        for kind in ("is_hybrid_swa", "is_hybrid_ssm"):
            assert unsupported(args, replace(PLAIN, **{kind: True}), 128) is None
        coded = _cache("auto", name)
        for codec in CHOICES:
            reason = unsupported_codec(coded, PLAIN, CakeConfig(codec=codec))
            assert (reason is not None) == (codec in LOSSY and has_draft_kv)


@since_0_5_23
@pytest.mark.parametrize(
    ("algorithm", "drafts", "advice"),
    [
        (None, [], None),
        ("NGRAM", [], None),
        ("FROZEN_KV_MTP", [], None),
        ("EAGLE", [None], None),
        ("EAGLE", ["target's"], None),
        ("EAGLE", ["target's", "own, in the target's slots"], None),
        ("EAGLE", ["target's", "own"], "recurrent states in slots of its own"),
        ("EAGLE", [], "did not see the draft model of EAGLE"),
    ],
)
def test_support_matrix_draft_model_whose_kv_would_be_missing_is_refused(
    algorithm: str | None, drafts: list[str | None], advice: str | None
) -> None:
    """Args: drafts: the recurrent states of each draft model."""
    args = SimpleNamespace(
        speculative_algorithm=algorithm, speculative_num_steps=3, speculative_adaptive=False
    )
    slots, others = object(), object()
    models = []
    for states in drafts:
        mapping = others if states == "own" else slots
        pool = SimpleNamespace(mamba_pool=states, req_index_to_mamba_index_mapping=mapping)
        runner: Any = SimpleNamespace(req_to_token_pool=pool)
        models.append(LoadedDraft(runner, ModelSource("d"), None))
    requests = SimpleNamespace(mamba_pool="target's", req_index_to_mamba_index_mapping=slots)
    reason = unsupported_drafts(args, models, requests)
    assert (reason is None) == (advice is None)
    assert reason is None or (str(advice) in reason and "\n" not in reason)


@pytest.mark.parametrize(
    ("steps", "adaptive", "is_refused"), [(3, False, False), (0, False, True), (3, True, True)]
)
def test_support_matrix_steps_without_drafts_are_refused_if_they_leave_out_draft_kv(
    steps: int, adaptive: bool, is_refused: bool
) -> None:
    args = SimpleNamespace(
        speculative_algorithm="EAGLE", speculative_num_steps=steps, speculative_adaptive=adaptive
    )
    runner: Any = SimpleNamespace(req_to_token_pool=SimpleNamespace())
    models = [LoadedDraft(runner, ModelSource("d"), None)]
    assert unsupported_drafts(args, models, SimpleNamespace()) is None
    with envs.SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND.override(True):
        reason = unsupported_drafts(args, models, SimpleNamespace())
    assert ("unset SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND" in str(reason)) == is_refused


@pytest.mark.skipif(
    not hasattr(envs, "SGLANG_DSPARK_DEFER_CONTEXT_KV"), reason="SGLang 0.5.22 writes it at once"
)
@pytest.mark.parametrize(("algorithm", "is_refused"), [("DSPARK", True), ("EAGLE", False)])
def test_support_matrix_draft_kv_of_dspark_that_is_written_a_step_later_is_refused(
    algorithm: str, is_refused: bool
) -> None:
    args = SimpleNamespace(
        speculative_algorithm=algorithm, speculative_num_steps=3, speculative_adaptive=False
    )
    runner: Any = SimpleNamespace(req_to_token_pool=SimpleNamespace())
    models = [LoadedDraft(runner, ModelSource("d"), None)]
    with envs.SGLANG_DSPARK_DEFER_CONTEXT_KV.override(True):
        reason = unsupported_drafts(args, models, SimpleNamespace())
    assert ("unset SGLANG_DSPARK_DEFER_CONTEXT_KV" in str(reason)) == is_refused


def test_support_matrix_states_of_drafts_are_refused_where_sglang_keeps_those_beyond_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "sglang.srt.managers.scheduler_components.batch_result_processor"
    processor = pytest.importorskip(module).SchedulerBatchResultProcessor
    args = SimpleNamespace(speculative_algorithm="NGRAM")
    states, none = SimpleNamespace(mamba_pool=object()), SimpleNamespace()
    monkeypatch.setattr(processor, "_mamba_can_cache_finished_req", None, raising=False)
    assert unsupported_drafts(args, [], states) is None
    monkeypatch.delattr(processor, "_mamba_can_cache_finished_req")
    reason = unsupported_drafts(args, [], states)
    assert "install 0.5.23" in str(reason)
    assert "\n" not in str(reason)
    assert unsupported_drafts(args, [], none) is None
    args.speculative_algorithm = None
    assert unsupported_drafts(args, [], states) is None


def test_support_matrix_rules_use_existing_server_args() -> None:
    pytest.importorskip("sglang")
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path="none")
    assert unsupported(args, None, 128) is None
    assert unsupported_codec(args, PLAIN, CakeConfig(codec="int4")) is None
    for field in (*MEMBER, *(field for field, _, _ in RULES)):
        assert hasattr(args, field)


# ---- docs/troubleshooting.md ----

_REASONS = (
    "build.py",
    "support_matrix.py",
    "memory/pool_planes.py",
    "memory/end_states.py",
    "memory/kv_pool.py",
    "memory/kv_shard.py",
    "memory/pool_planes.py",
)


def _reasons(source: str) -> Iterator[str]:
    """The texts of all refusals in a module, with `…` for what they fill in. KV-Runahead has a page
    of its own."""
    tree = ast.parse(source)
    group = ("unsupported_group", "_unfit_device")
    tree.body = [each for each in tree.body if getattr(each, "name", None) not in group]
    for node in ast.walk(tree):
        found: list[ast.expr | None] = []
        match node:
            case ast.Return(value=value):
                found = [value]
            case ast.Call(func=ast.Name(id="ConfigError"), args=args):
                found = [*args]
            case ast.Assign(targets=[ast.Name(id="reason")], value=value):
                found = [value]
        for each in found:
            match each:
                case ast.Constant(value=str(text)):
                    yield text
                case ast.JoinedStr(values=parts):
                    yield "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts
                    )


def test_support_matrix_every_refusal_has_a_row_in_troubleshooting() -> None:
    root = Path(support_matrix.__file__).parent
    reasons = [text for name in _REASONS for text in _reasons((root / name).read_text())]
    reasons += [*(reason for _, _, reason in RULES), *REFUSED.values()]
    reasons += ["exclude each other: another radix cache backend"]  # of flags.py
    whole = ("cake …", "cake does not support …", "…: …", "--…")
    reasons = [text for text in reasons if text not in whole and not text.startswith("KV-Runahead")]
    assert len(reasons) > 60
    page = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
    tables = page.read_text().split("Why a server is refused")[1].split("## The store")[0]
    words: list[str] = []
    for line in tables.splitlines():
        if line.startswith("| `"):
            words += re.findall(r"`([^`]+)`", line.split("|")[1])
    assert [text for text in reasons if not any(each in text for each in words)] == []
    assert [each for each in words if not any(each in text for text in reasons)] == []
    flags = [f"--{field.replace('_', '-')}" for field, _, _ in RULES]
    beside = {  # one row for all caches
        "--enable-hierarchical-cache",
        "--enable-lmcache",
        "--enable-flexkv",
        "--enable-unified-cache-external-linker",
    }
    assert [flag for flag in flags if flag not in beside and f"`{flag}" not in tables] == []
    for reason in REFUSED.values():
        assert all(example in tables for example in _examples(reason))
