"""The rows that `xd.compile` may refuse: each with what its error must say.

Such a row passes with torch's values, or with an error that matches; any other row passes with
torch's values only.
"""

from __future__ import annotations

CPU = r"CPU"
MODE = r"(train|eval)\(\)|training"

REFUSED: dict[str, str] = {
    # Values of CPU tensors in the step's Python, and arithmetic with CPU tensors.
    "host-cpu_numbers_drawn": CPU,
    **dict.fromkeys(
        (
            f"host-{name}-{part}"
            for name in (
                "cpu_tensor_read_through_another_that_is_written",
                "cpu_argument_that_is_part_of_a_captured_one",
            )
            for part in ("view", "data", "detached")
        ),
        CPU,
    ),
    "on_the_host-aliases_of_one_array": CPU,
    "on_the_host-optimizer_on_the_host-adam": r'CPU .*Adam.*\.to\("xla"\)',
    "on_the_host-result_with_a_history": r"its history isn't kept",
    # What the step's Python does besides computing.
    "effects-left_behind-list_append": r"list|holder",
    "effects-left_behind-list_append_number": r"list|holder",
    "effects-left_behind-list_extend": r"list|holder",
    "effects-left_behind-list_pop": r"list|holder",
    "effects-left_behind-dict_item": r"dict|holder",
    "effects-left_behind-dict_deleted": r"dict|holder",
    "effects-cpu_tensor_appended": r"list|log",
    "effects-hook_registered_in_the_step": r"(?i)hook",
    "effects-hook_for_the_time_of_the_step": r"(?i)hook|seen",
    "effects-drawn_on_the_host-iterator": r"(?i)counter|count|next",
    "effects-drawn_on_the_host-random": r"(?i)random",
    "effects-drawn_on_the_host-choice": r"(?i)random",
    "effects-drawn_on_the_host-numpy": r"(?i)random",
    "effects-drawn_on_the_host-numpy_generator": r"(?i)generator",
    "effects-prepared_iterator": r"(?i)iterator|loader|next",
    "objects-arrays_that_the_step_writes_to": r"array",
    "objects-generator_that_the_step_has_begun": r"generator",
    "objects-iterator_of_which_less_is_taken": r"iterator",
    "told-scripted_module_that_counts": r"torch\.jit",
    # Places that a step keeps and replaces.
    "kept-list_of_states_written_and_replaced": r"states",
    "kept-state_with_its_history": r"history",
    "kept-features_compared_with_those_before": r"history",
    "kept-counter_asked_for_its_type": r"state\.n",
    "kept-large_ints": r"state\.seed",
    # History from outside of the step, and what torch itself looks at.
    "leaves-follower_by_data-shared": r"others show what it was",
    "leaves-follower_that_is_seen-detached": r"others show what it was",
    "leaves-follower_that_is_seen-state_dict": r"others show what it was",
    "leaves-gradient_with_new_memory-detached": r"changes the memory",
    "leaves-gradient_with_new_memory-of_another": r"changes the memory",
    "leaves-memory_given_and_returned-itself": r"changes the memory|return a clone",
    "leaves-leaf_becomes_part_of_a_graph": r"backward\(\)",
    "modules-parametrization_cached": r"cached\(\)",
    # What happens in an optimizer's step.
    **dict.fromkeys(
        (f"stepping-scheduler_in_a_hook-{name}-pre" for name in ("step", "cosine", "one_cycle")),
        r"before the optimizer's step\(\)",
    ),
    "stepping-behind_a_scheduler-reads": r"reads 'lr' of a param group behind StepLR.step\(\)",
    "stepping-behind_a_scheduler-sets": r"sets 'lr' of a param group behind a scheduler",
    "stepping-groups_added": r"adds, removes or replaces param groups of SGD",
    "own_optimizers-own-Estimating": r"item\(\)",
}
