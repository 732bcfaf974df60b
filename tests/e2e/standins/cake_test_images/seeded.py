"""The processor: an image is a text `HEIGHTxWIDTH SEED`, in patches."""

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
        self, image_data: list[str], input_text: list[int], *args: Any, **kwargs: Any
    ) -> MultimodalProcessorOutput:
        config = self.hf_config
        tokens = torch.tensor(input_text)
        offsets = self.get_mm_items_offset(tokens, config.image_token_id)
        vision = config.vision_config
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        items, grids = [], []
        for text, offset in zip(image_data, offsets, strict=True):
            size, _, seed = text.partition(" ")
            height, _, breadth = size.partition("x")
            grid = torch.tensor([[1, int(height), int(breadth)]])
            random_of = torch.Generator().manual_seed(int(seed))
            feature = torch.randn(int(grid.prod()), width, generator=random_of)
            item = MultimodalDataItem(modality=Modality.IMAGE, feature=feature, offsets=[offset])
            item.image_grid_thw = grid
            items.append(item)
            grids.append(grid)
        positions, delta = _positions(config, tokens.unsqueeze(0), torch.cat(grids))
        return MultimodalProcessorOutput(
            input_ids=list(input_text),
            mm_items=items,
            im_token_id=config.image_token_id,
            mrope_positions=positions.squeeze(1),
            mrope_position_delta=delta,
        )


def _positions(config: Any, tokens: torch.Tensor, grids: torch.Tensor) -> Any:
    """As SGLang's own processors of these models compute them."""
    if config.model_type == "glm4v":
        return MRotaryEmbedding.get_rope_index_glm4v(
            input_ids=tokens,
            hf_config=config,
            image_grid_thw=grids,
            video_grid_thw=None,
            attention_mask=None,
        )
    return MRotaryEmbedding.get_rope_index(
        spatial_merge_size=config.vision_config.spatial_merge_size,
        image_token_id=config.image_token_id,
        video_token_id=config.video_token_id,
        vision_start_token_id=config.vision_start_token_id,
        model_type=config.model_type,
        tokens_per_second=getattr(config.vision_config, "tokens_per_second", None),
        input_ids=tokens,
        image_grid_thw=grids,
    )
