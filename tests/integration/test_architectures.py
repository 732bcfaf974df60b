"""How many architectures of SGLang are served: each one by its kinds, without loading a model."""

import ast
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang.srt.models
from sglang.srt.arg_groups import overrides
from sglang.srt.configs import model_config
from sglang.srt.server_args import ServerArgs

from sglang_cake.integration import compat
from sglang_cake.integration.support_matrix import (
    EMBEDDING_ARCHITECTURES,
    FAMILIES,
    MEDIA_ARCHITECTURES,
    ModelTraits,
    unsupported,
)
from sglang_cake.simulator.shapes import EMBEDDINGS

# Drafts, judges, embeddings, encoders, transcribers, diffusion models, and stand-ins for others.
NO_GENERATION = re.compile(
    r"""NextN$ | MTP$ | Eagle | Draft | Assistant | DSpark | DFlash | Embedding | Embed | Reward
    | Classification | ^(Bert|CLIP|XLMRoberta|Mistral|Qwen3|PixtralVision)Model | Contriever
    | Lfm2Bidirectional | ASR | Asr | ^Whisper | Diffusion | ^TransformersMultiModal | ^TorchNative
    | ^MindSpore | LLaDA | SDAR | ^Cosmos3 | ^GlmImage""",
    re.VERBOSE,
)
MAMBA = overrides._MAMBA_RADIX_CACHE_ARCHS | {
    "FalconMambaForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "InklingForConditionalGeneration",
    "KimiK3LinearForCausalLM",
    "Lfm2VlForConditionalGeneration",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "MiniCPMSALAForCausalLM",
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Nano_VL_V2",
}
# Of those that `is_deepseek_dsa` names, the ones whose checkpoints all have an index.
DSA = {
    "DeepseekV32ForCausalLM",
    "Dots3NoteForCausalLM",
    "Glm5NextForConditionalGeneration",
    "GlmMoeDsaForCausalLM",
    "HYV4ForCausalLM",
}


def architectures() -> list[str]:
    """The classes that SGLang's model files register."""
    return sorted(sources())


def registered(text: str) -> list[str]:
    """The classes that a model file registers."""
    found: list[str] = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
            found += re.findall(r"\w+", ast.unparse(node.value))
    return found


def sources() -> dict[str, str]:
    """The model file of each class."""
    files = sorted(Path(sglang.srt.models.__path__[0]).glob("*.py"))
    return {name: text for text in map(Path.read_text, files) for name in registered(text)}


def generative() -> list[str]:
    return [name for name in architectures() if not NO_GENERATION.search(name)]


def traits_of(name: str) -> ModelTraits:
    """As the architecture's name has them. Some depend on the checkpoint's configuration, too."""
    config = SimpleNamespace(architectures=[name])
    return ModelTraits(
        is_hybrid_swa=model_config.is_hybrid_swa_model([name]),
        is_hybrid_ssm=name in MAMBA,
        is_encoder_decoder=model_config.is_encoder_decoder_model([name]),
        is_multimodal=name in model_config.multimodal_model_archs,
        is_compressed=model_config.is_deepseek_v4(config),
        is_sparse=name in DSA or model_config.is_minimax_sparse(config),
    )


def kinds_of(traits: ModelTraits) -> tuple[str, ...]:
    found = (field.name for field in fields(traits) if getattr(traits, field.name) is True)
    return tuple(name for name in found if name != "is_generation")


counted_in_0_5_23 = pytest.mark.skipif(
    compat.INSTALLED == "0.5.22", reason="SGLang 0.5.23 has more architectures"
)


@counted_in_0_5_23
def test_architectures_by_kind_are_those_that_were_reviewed() -> None:
    kinds = Counter(kinds_of(traits_of(name)) for name in generative())
    assert kinds == {
        (): 88,
        ("is_multimodal",): 47,
        ("is_hybrid_ssm",): 22,
        ("is_hybrid_swa",): 11,
        ("is_hybrid_swa", "is_compressed"): 1,
        ("is_hybrid_ssm", "is_multimodal"): 11,
        ("is_hybrid_swa", "is_multimodal"): 7,
        ("is_sparse",): 4,
        ("is_encoder_decoder", "is_multimodal"): 2,
        ("is_multimodal", "is_sparse"): 2,
        ("is_hybrid_ssm", "is_multimodal", "is_sparse"): 1,
        ("is_hybrid_swa", "is_hybrid_ssm"): 1,
    }
    assert kinds.total() == 197


@counted_in_0_5_23
def test_architectures_that_are_served_are_counted_and_others_have_a_reason() -> None:
    args = ServerArgs(model_path="none")
    reasons = {name: unsupported(args, traits_of(name), 128) for name in generative()}
    served = [name for name, reason in reasons.items() if reason is None]
    assert len(served) == 195, Counter(reason for reason in reasons.values() if reason)
    refused = {family.refused for family in FAMILIES if family.refused is not None}
    for reason in set(reasons.values()) - {None}:
        assert str(reason).removeprefix("cake does not support ") in refused
        assert "\n" not in str(reason)


def test_architectures_with_reviewed_media_are_multimodal_ones_of_sglang() -> None:
    assert set(generative()) >= MEDIA_ARCHITECTURES
    assert set(model_config.multimodal_model_archs) >= MEDIA_ARCHITECTURES


def test_architectures_with_reviewed_vectors_pool_the_last_token() -> None:
    for name in EMBEDDING_ARCHITECTURES:
        pooled = re.findall(r"PoolingType\.(\w+)", sources()[name])
        assert set(pooled) == {"LAST"}, name
    judged = {name for name in EMBEDDING_ARCHITECTURES if NO_GENERATION.search(name)}
    assert judged == EMBEDDINGS  # `sglang-cake plan` does not refuse them
