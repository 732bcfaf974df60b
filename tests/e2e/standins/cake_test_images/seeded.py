"""The processor: an image is a text `HEIGHTxWIDTH SEED`, in patches of 16 pixels."""

from typing import Any, ClassVar

import torch
from sglang.srt.layers.rotary_embedding import MRotaryEmbedding
from sglang.srt.managers.schedule_batch import MultimodalDataItem, MultimodalProcessorOutput
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.multimodal.modality import Modality
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

MODELS = ("Qwen3VLForConditionalGeneration", "Qwen3_5ForConditionalGeneration")


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
        positions, delta = MRotaryEmbedding.get_rope_index(
            spatial_merge_size=vision.spatial_merge_size,
            image_token_id=config.image_token_id,
            video_token_id=config.video_token_id,
            vision_start_token_id=config.vision_start_token_id,
            model_type=config.model_type,
            input_ids=tokens.unsqueeze(0),
            image_grid_thw=torch.cat(grids),
        )
        return MultimodalProcessorOutput(
            input_ids=list(input_text),
            mm_items=items,
            im_token_id=config.image_token_id,
            mrope_positions=positions.squeeze(1),
            mrope_position_delta=delta,
        )
