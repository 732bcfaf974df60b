"""The order of the waiting queue, and how the request that is being chunked goes back to it.

SGLang serves its chunked request before the queue and knows only one. A stored prompt that is being
loaded takes what others leave (`read/share.py`), so it must be able to step aside between two of
its chunks. The tree has those chunks already: it gives up its row, waits in the queue, and is
matched again, in the same step if there is budget left.
"""

from itertools import groupby
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.common import release_kv_cache

from sglang_cake.adapter.tree import CakeRadixCache
from sglang_cake.read.share import order

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_cake.adapter.coordinator import Coordinator


def take_turns(queue: "list[Req]", cake: "Coordinator") -> None:
    """Reorder SGLang's waiting queue in place. Priorities, where requests have some, stay first."""
    if not cake.adaptive or not (cake.fair or any(cake.racing(req.rid) for req in queue)):
        return
    turns: list[Req] = []
    for _, group in groupby(queue, key=lambda req: req.priority):
        equals = list(group)
        turns += [equals[i] for i in order([cake.claimant(req) for req in equals])]
    queue[:] = turns


def gives_way(req: "Req", queue: "list[Req]", cake: "Coordinator") -> bool:
    """Whether somebody who waits goes before the request that is being chunked."""
    # Logprobs of a prompt are gathered chunk by chunk: such a request cannot start over.
    if not cake.adaptive or not queue or req.return_logprob or not cake.racing(req.rid):
        return False
    equals = [each for each in queue if each.priority == req.priority]
    return order([cake.claimant(each) for each in (req, *equals)])[0] != 0


def put_back(req: "Req", queue: "list[Req]", tree: CakeRadixCache) -> None:
    """The chunked request, whose chunks are in the tree, waits in the queue again."""
    tree.releasing = req.rid
    release_kv_cache(req, tree, checkpoint=False)
    tree.releasing = None
    # What `Req.reset_for_retract` does, but for what the chunk under way still needs: its result
    # is yet to be processed, and must be taken for a middle chunk's.
    req.prefix_len = 0
    req.extend_end = None
    req.last_node = None
    req.lock = None
    req.num_matched_prefix_tokens = 0
    req.kv_rotation_base = None
    req.kv.cache_protected_len = 0
    req.kv.cache_inserted_len = 0
    req.kv.kv_committed_len = 0
    queue.insert(0, req)
