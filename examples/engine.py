"""A script with `sglang.Engine`: one long document again and again, until the store has its KV.

python examples/engine.py MODEL [STORE_URL] [--cpu]
"""

import sys
import time

import sglang

CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "cuda_graph_backend_decode": "disabled",
    "max_total_tokens": 16384,
}


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--cpu"]
    options = CPU if "--cpu" in sys.argv else {}
    store = {"cake_store": words[1]} if len(words) > 1 else {}
    with sglang.Engine(model_path=words[0], enable_cake=True, **store, **options) as engine:
        document = " ".join(f"Clause {n}: the tenant pays {n * 13 % 97} francs." for n in range(80))
        for number in range(10):  # as a rule the second one loads
            began_s = time.perf_counter()
            answer = engine.generate(f"{document}\nClause {number}?", {"max_new_tokens": 8})
            took_s = time.perf_counter() - began_s
            found = answer["meta_info"]["cake"]
            print(f"{took_s:.2f} s, {found}", flush=True)
            if found["loaded_tokens"]:
                break
            time.sleep(2)  # the blocks are written in the background
            engine.flush_cache()  # device memory forgets, the store does not


if __name__ == "__main__":  # the engine starts processes, which import this file
    main()
