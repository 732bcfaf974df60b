"""The processor: an image is a text `HEIGHTxWIDTH SEED`, in patches, and a video is a text
`TIMExHEIGHTxWIDTH SEED`. The frames of a video may have text between them."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from sglang.srt.layers.rotary_embedding import MRotaryEmbedding
from sglang.srt.managers.schedule_batch import MultimodalDataItem, MultimodalProcessorOutput
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.multimodal.modality import Modality
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

MODELS = (
    "Glm4vForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
)


class SeededImages(BaseMultimodalProcessor):
    models: ClassVar[list[type]] = [
        ModelRegistry.models[name] for name in MODELS if name in ModelRegistry.models
    ]

    async def process_mm_data_async(
        self,
        image_data: list[str] | None,
        input_text: list[int],
        request_obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> MultimodalProcessorOutput:
        config = self.hf_config
        tokens = torch.tensor(input_text)
        items, grids = [], {}
        for modality, texts, token in (
            (Modality.IMAGE, image_data, config.image_token_id),
            (Modality.VIDEO, request_obj.video_data, config.video_token_id),
        ):
            if not texts:
                continue
            spans = iter(self.get_mm_items_offset(tokens, token))
            found = [_item(modality, text, spans, config.vision_config) for text in texts]
            name = f"{modality.name.lower()}_grid_thw"
            grids[name] = torch.cat([getattr(item, name) for item in found])
            items += found
        positions, delta = _positions(config, tokens.unsqueeze(0), **grids)
        return MultimodalProcessorOutput(
            input_ids=list(input_text),
            mm_items=items,
            im_token_id=config.image_token_id,
            video_token_id=config.video_token_id,
            mrope_positions=positions.squeeze(1),
            mrope_position_delta=delta,
        )


def _item(
    modality: Modality, text: str, spans: Iterator[tuple[int, int]], vision: Any
) -> MultimodalDataItem:
    """Args: spans: of tokens that stand for items; those of this item are taken."""
    size, _, seed = text.partition(" ")
    grid = torch.tensor([[1, *map(int, size.split("x"))][-3:]])
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    random_of = torch.Generator().manual_seed(int(seed))
    feature = torch.randn(int(grid.prod()), width, generator=random_of)
    offsets, left = [], len(feature) // vision.spatial_merge_size**2
    while left > 0:
        start, end = next(spans)
        offsets.append((start, end))
        left -= end + 1 - start
    item = MultimodalDataItem(modality=modality, feature=feature, offsets=offsets)
    setattr(item, f"{modality.name.lower()}_grid_thw", grid)
    return item


def _positions(config: Any, tokens: torch.Tensor, **grids: torch.Tensor) -> Any:
    """As SGLang's own processors of these models compute them."""
    if config.model_type == "glm4v":
        return MRotaryEmbedding.get_rope_index_glm4v(
            input_ids=tokens,
            hf_config=config,
            attention_mask=None,
            **({"video_grid_thw": None} | grids),
        )
    return MRotaryEmbedding.get_rope_index(
        spatial_merge_size=config.vision_config.spatial_merge_size,
        image_token_id=config.image_token_id,
        video_token_id=config.video_token_id,
        vision_start_token_id=config.vision_start_token_id,
        model_type=config.model_type,
        tokens_per_second=getattr(config.vision_config, "tokens_per_second", None),
        input_ids=tokens,
        **grids,
    )
