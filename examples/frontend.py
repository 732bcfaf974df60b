"""A program in SGLang's frontend language, run against a server that was started with cake.

    sglang serve --model-path MODEL --enable-cake
    python examples/frontend.py http://127.0.0.1:30000

The branches of one document share its KV in the tree. The next run of the program, after a restart
of the server, gets it from the store.
"""

import sys

import sglang as sgl

DOCUMENT = " ".join(f"Row {n}: {n * n % 101} units in stock." for n in range(120))


@sgl.function
def read_stock(s):
    s += "A list of stock.\n" + DOCUMENT + "\n"
    branches = s.fork(2)
    for branch, row in zip(branches, (3, 77), strict=True):
        branch += f"Row {row} says: "
        branch += sgl.gen("units", max_tokens=4)
    s += "Rows 3 and 77: " + branches[0]["units"] + ", " + branches[1]["units"] + ". In order? "
    s += sgl.select("verdict", choices=["yes", "no"])


def main() -> None:
    sgl.set_default_backend(sgl.RuntimeEndpoint(sys.argv[1]))
    state = read_stock.run()
    print(f"verdict: {state['verdict']}")


if __name__ == "__main__":
    main()
