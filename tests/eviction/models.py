"""Every policy again, as plainly as can be: lists, searched from end to end."""

import itertools
import math

from sglang_cake.stores.eviction.policy import Usage


class Model:
    """What is common: blocks with their usage, and the order in which they were last heard of."""

    def __init__(self):
        self.usage, self.tick, self.ticks = {}, {}, itertools.count()

    def add(self, block, usage):
        self.usage[block] = usage
        self.tick[block] = next(self.ticks)

    def touch(self, block, at_s, uses=1, context=None):
        if block in self.usage:
            old = self.usage[block]
            self.on_touch(
                block,
                Usage(
                    old.stored_bytes,
                    old.created_s,
                    max(at_s, old.used_s),
                    old.uses + uses,
                    old.ident,
                    context or old.context,
                ),
            )

    def on_touch(self, block, usage):
        self.add(block, usage)

    def remove(self, block):
        self.usage.pop(block, None)

    def pop(self, now_s):
        if not self.usage:
            return None
        block = self.choose(now_s)
        return block, self.usage.pop(block)


class Ranked(Model):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def choose(self, now_s):
        return min(self.usage, key=lambda b: (*self.rank(b, self.usage[b]), self.tick[b]))


class Gdfs(Model):
    def __init__(self, benefit):
        super().__init__()
        self.benefit, self.clock, self.priority = benefit, 0.0, {}

    def add(self, block, usage):
        super().add(block, usage)
        cost = self.benefit.compute_s(usage.context.position)
        self.priority[block] = self.clock + (usage.uses + 1) * cost / usage.stored_bytes

    def choose(self, now_s):
        block = min(
            self.usage, key=lambda b: (self.priority[b], self.usage[b].used_s, self.tick[b])
        )
        self.clock = self.priority[block]
        return block


class S3Fifo(Model):
    def __init__(self):
        super().__init__()
        self.small, self.main, self.ghosts, self.frequency, self.size = [], [], [], {}, 0

    def add(self, block, usage):
        if block not in self.usage:
            while 10 * len(self.ghosts) > 9 * self.size:
                self.ghosts.pop(0)
            queue = self.small
            if usage.ident in self.ghosts:
                self.ghosts.remove(usage.ident)
                queue = self.main
            queue.append(block)
            self.frequency[block] = 0
        self.usage[block] = usage
        self.size = max(self.size, len(self.usage))

    def on_touch(self, block, usage):
        self.frequency[block] += usage.uses - self.usage[block].uses
        self.frequency[block] = min(3, self.frequency[block])
        self.usage[block] = usage

    def remove(self, block):
        super().remove(block)
        for queue in (self.small, self.main):
            if block in queue:
                queue.remove(block)

    def choose(self, now_s):
        while True:
            if 10 * len(self.small) >= len(self.usage):
                block = self.small.pop(0)
                if self.frequency[block] > 1:
                    self.main.append(block)
                    self.frequency[block] = 0
                    continue
                ident = self.usage[block].ident
                self.ghosts = [g for g in self.ghosts if g != ident] + [ident]
                return block
            block = self.main.pop(0)
            if self.frequency[block] == 0:
                return block
            self.frequency[block] -= 1
            self.main.append(block)


class Arc(Model):
    def __init__(self):
        super().__init__()
        self.t1, self.t2, self.b1, self.b2, self.p, self.c = [], [], [], [], 0.0, 0

    def add(self, block, usage):
        if block in self.usage:
            self.on_touch(block, usage)
            return
        while self.b1 and len(self.t1) + len(self.b1) > self.c:
            self.b1.pop(0)
        while self.b2 and sum(map(len, (self.t1, self.t2, self.b1, self.b2))) > 2 * self.c:
            self.b2.pop(0)
        self.usage[block] = usage
        self.c = max(self.c, len(self.usage))
        if usage.ident in self.b1:
            self.p = min(self.c, self.p + max(1, len(self.b2) / len(self.b1)))
            self.b1.remove(usage.ident)
            self.t2.append(block)
        elif usage.ident in self.b2:
            self.p = max(0, self.p - max(1, len(self.b1) / len(self.b2)))
            self.b2.remove(usage.ident)
            self.t2.append(block)
        else:
            self.t1.append(block)

    def on_touch(self, block, usage):
        self.usage[block] = usage
        for queue in (self.t1, self.t2):
            if block in queue:
                queue.remove(block)
        self.t2.append(block)

    def remove(self, block):
        super().remove(block)
        for queue in (self.t1, self.t2):
            if block in queue:
                queue.remove(block)

    def choose(self, now_s):
        first = self.t1 and (len(self.t1) > self.p or not self.t2)
        block = (self.t1 if first else self.t2).pop(0)
        ident = self.usage[block].ident
        ghosts = self.b1 if first else self.b2
        if ident in ghosts:
            ghosts.remove(ident)
        ghosts.append(ident)
        return block


class ByReuse(Model):
    """`workload` and `cake`: of all blocks the one of the smallest value, of equal ones the least
    recent.

    Args: value: of a usage and the logarithm of the probability of a use.
    """

    def __init__(self, fits, pooled, life_s, value):
        super().__init__()
        self.fits, self.pooled, self.life_s, self.value = fits, pooled, life_s, value

    def choose(self, now_s):
        return min(
            self.usage, key=lambda b: (*self.value_of(b, now_s), self.usage[b].used_s, self.tick[b])
        )

    def value_of(self, block, now_s):
        usage = self.usage[block]
        fit = self.fits[usage.context.workload, min(usage.context.turn, 4), min(usage.uses, 1)]
        age_s = max(0.0, now_s - usage.used_s)
        own, pooled = self.chance(fit, age_s), self.chance(self.pooled, age_s)
        return self.value(usage, math.log(own * pooled) / 2)

    def chance(self, fit, age_s):
        faded = fit.share * math.exp(-fit.rate_per_s * age_s)
        return faded * (1 - math.exp(-fit.rate_per_s * self.life_s)) / (1 - fit.share + faded)


def s3fifo_hits(idents, size):
    """Which accesses hit a cache of `size` objects that runs the pseudo code of the S3-FIFO
    paper (algorithm 1)."""
    small, main, ghosts, frequency, hits = [], [], [], {}, []
    for ident in idents:
        hits.append(ident in small or ident in main)
        if hits[-1]:
            frequency[ident] = min(3, frequency[ident] + 1)
            continue
        while len(small) + len(main) == size:
            if 10 * len(small) >= size:
                tail = small.pop(0)
                if frequency[tail] > 1:
                    main.append(tail)
                    frequency[tail] = 0
                else:
                    ghosts.append(tail)
                    del ghosts[: max(0, len(ghosts) - 9 * size // 10)]
            else:
                tail = main.pop(0)
                if frequency[tail] > 0:
                    main.append(tail)
                    frequency[tail] -= 1
        if ident in ghosts:
            ghosts.remove(ident)
            main.append(ident)
        else:
            small.append(ident)
        frequency[ident] = 0
    return hits
