"""Models that refuse `torch_native` run with it. A plugin of SGLang, used only by tests, with
CAKE_TEST_ANY_BACKEND set."""

import os


def register() -> None:
    if "CAKE_TEST_ANY_BACKEND" in os.environ:
        from sglang.srt.arg_groups import model_hook

        model_hook.attention_backends_of = lambda view: ("triton", "triton")  # that none refuses
