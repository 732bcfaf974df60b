"""Turns of a conversation, told from what requests begin with."""

from sglang_cake.stores.reported_accesses import ConversationTracker, KnownPrompt


def turns(*prompts, max_blocks=1000):
    tracker, found = ConversationTracker(), []
    tracker.max_blocks = max_blocks
    for prompt in prompts:
        found.append(tracker.turn_of(prompt))
        tracker.record(prompt, KnownPrompt(found[-1], len(prompt)))
    return found


def test_conversation_tracker_extended_or_repeated_prompt_is_the_next_turn():
    assert turns([1, 2], [1, 2, 3], [1, 2, 3, 4, 5], [9]) == [1, 2, 3, 1]
    assert turns([1, 2], [1, 2]) == [1, 2]


def test_conversation_tracker_shared_system_prompt_alone_is_turn_one():
    assert turns([1, 2, 3, 4, 5, 6], [1, 2, 13, 14], [1, 2, 23, 24, 25]) == [1, 1, 1]
    assert turns([1, 2, 3], [1, 2, 13], [1, 2, 23, 24]) == [1, 1, 1]


def test_conversation_tracker_beyond_its_bound_forgets_old_prompts():
    assert turns([1, 2], *([number] for number in range(10, 30)), [1, 2, 3], max_blocks=5)[-1] == 1
