"""How many cases of a test are in the first tier, which ``make test`` runs; ``make test-rest`` runs the others.

Named are tests that take more than some seconds. The number of cases that stay in the first tier are spread evenly over
the cases of the test; 0 moves all of them to the second tier, by the mark ``thorough``. A test that is not named stays
in the first tier with all its cases. Every claim keeps a test there.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

FIRST: dict[str, int] = {
    "tests/benchmarks/test_budget.py::test_lowest_peak_gives_the_same_bits": 0,
    "tests/benchmarks/test_budget.py::test_plan_that_is_kept_is_taken": 0,
    "tests/benchmarks/test_budget.py::test_table_has_a_line_for_every_row": 0,
    "tests/benchmarks/test_budget.py::test_times_are_of_every_row_and_round": 0,
    "tests/benchmarks/test_planning.py::test_rows_say_what_a_budget_adds_and_leaves_open": 0,
    "tests/benchmarks/test_plan_changes.py::test_a_plan_is_recorded_as_it_is_made": 0,
    "tests/capture/test_in_place_values.py::test_a_budget_drops_what_an_activation_wrote_over": 2,
    "tests/capture/test_moved.py::test_every_result_is_that_of_its_operator_on_the_gpu": 5,
    "tests/capture/test_rng_replay.py::test_train_step_draws_what_eager_draws": 3,
    "tests/cli/test_cli.py::test_demo_measures_all_sides": 0,
    "tests/cli/test_cli.py::test_exit_code_is_two_where_it_does_not_fit": 1,
    "tests/cli/test_cli.py::test_explain_says_what_is_made_again": 0,
    "tests/cli/test_cli.py::test_explain_shows_what_lower_peaks_cost": 0,
    "tests/cli/test_cli.py::test_json_is_the_same_with_a_page": 0,
    "tests/cli/test_cli.py::test_no_page_is_left_of_a_plan_that_does_not_fit": 0,
    "tests/cli/test_cli.py::test_several_budgets_are_compared_in_one_table": 0,
    "tests/cli/test_device.py::test_built_in_models_are_planned_for_a_gpu": 2,
    "tests/cli/test_zoo.py::test_forward_and_backward_alone_are_planned_and_know_their_lines": 2,
    "tests/cli/test_zoo.py::test_model_is_planned_without_weights": 3,
    "tests/codegen/test_group_judge.py::test_groups_that_fit_pass_and_forced_ones_pass_only_with_right_numbers": 3,
    "tests/cost/test_cost.py::test_every_operator_of_the_models_has_a_price": 2,
    "tests/end_to_end/test_agreement.py::test_ranks_that_have_other_values_are_refused_on_all_ranks": 1,
    "tests/end_to_end/test_budget.py::test_budget_leaves_every_bit": 1,
    "tests/end_to_end/test_changes.py::test_nothing_has_changed": 6,
    "tests/end_to_end/test_eager_peak.py::test_eagers_peak_is_what_the_allocator_sees": 12,
    "tests/end_to_end/test_fake.py::test_planning_allocates_nothing_of_the_model": 1,
    "tests/end_to_end/test_models.py::test_optimize_and_torch_compile_equal_aot_eager": 3,
    "tests/end_to_end/test_models.py::test_train_step_equals_eager": 3,
    "tests/end_to_end/test_optimizer_database.py::test_entry": 12,
    "tests/end_to_end/test_part_writes.py::test_gradients_are_those_of_eager": 6,
    "tests/end_to_end/test_peak.py::test_small_model_takes_no_more_than_eager": 4,
    "tests/end_to_end/test_recurrent.py::test_dropout_between_layers_is_eagers": 3,
    "tests/end_to_end/test_reliability.py::test_ctrl_c_at_any_line_leaves_a_whole_number_of_steps": 3,
    "tests/end_to_end/test_reliability.py::test_two_hundred_steps_hold_the_memory_of_three": 1,
    "tests/end_to_end/test_repeated_arguments.py::test_the_bits_are_those_of_torch": 10,
    "tests/end_to_end/test_semantics.py::test_optimize_equals_aot_eager": 12,
    "tests/end_to_end/test_semantics.py::test_train_step_equals_eager": 24,
    "tests/end_to_end/test_shard.py::test_gradients_are_those_of_one_rank_and_plans_are_equal": 1,
    "tests/end_to_end/test_surroundings.py::test_change_between_two_calls_of_an_optimized_module": 5,
    "tests/end_to_end/test_whole_storages.py::test_saved_tensors_keep_what_lies_around_them": 6,
    "tests/end_to_end/test_without_arena.py::test_optimize_equals_aot_eager": 12,
    "tests/end_to_end/test_without_arena.py::test_train_step_equals_eager": 20,
    "tests/graph/test_memory.py::test_kept_models_are_those_of_the_graph_as_it_is": 1,
    "tests/graph/test_memory.py::test_model_live_bytes_are_real_in_program_order_reordered_and_with_in_place_reuse": 3,
    "tests/graph/test_memory.py::test_random_graph_live_bytes_are_real_in_program_order_and_any_other": 15,
    "tests/graph/test_printed.py::test_every_input_operator_output_and_storage_has_its_line": 4,
    "tests/graph/test_value_flow.py::test_plans_of_random_models_keep_the_values": 1,
    "tests/graph/test_verify.py::test_node_before_what_it_reads": 3,
    "tests/graph/test_verify.py::test_noted_geometry_is_wrong": 3,
    "tests/graph/test_verify.py::test_offset_is_misaligned_or_outside": 4,
    "tests/graph/test_verify.py::test_storages_that_live_together_overlap": 4,
    "tests/operators/test_blocks.py::test_binary_operators_have_the_bits_of_the_whole": 14,
    "tests/operators/test_blocks.py::test_unary_operators_have_the_bits_of_the_whole": 20,
    "tests/operators/test_gpu_kernels.py::test_kernel_of_every_operator_agrees_with_it": 1,
    "tests/operators/test_gpu_kernels.py::test_kernels_of_random_groups_agree_with_their_operators": 1,
    "tests/operators/test_overwrites.py::test_result_over_an_argument_has_the_same_bits": 68,
    "tests/passes/retain/test_search.py::test_no_set_of_codecs_is_below_the_bound": 1,
    "tests/passes/retain/test_search.py::test_programs_with_all_codecs_give_the_same_bits": 3,
    "tests/passes/retain/test_compress.py::test_random_codecs_with_random_reruns_on_top_leave_every_bit": 6,
    "tests/passes/retain/test_light.py::test_blocks_save_what_exact_recomputation_leaves": 1,
    "tests/passes/retain/test_light.py::test_min_goes_lower_and_runs_products_again": 0,
    "tests/passes/retain/test_light.py::test_nothing_heavy_runs_again_and_no_bit_changes": 1,
    "tests/rewriting/test_rerun.py::test_random_reruns_of_models_leave_every_bit": 1,
    "tests/rewriting/test_rerun.py::test_readers_of_runs_in_an_order_are_those_of_a_walk": 4,
    "tests/rewriting/test_rerun.py::test_random_reruns_of_random_graphs_leave_every_bit": 6,
    "tests/rewriting/test_rerun.py::test_reruns_ahead_of_their_readers_leave_every_bit": 4,
    "tests/rewriting/test_rerun.py::test_the_graph_has_no_more_live_bytes_than_the_solver_counted": 6,
    "tests/passes/retain/test_selective.py::test_free_choice_keeps_the_same_budget_in_less_time": 1,
    "tests/passes/test_eager.py::test_no_random_graph_is_planned_above_eager": 4,
    "tests/passes/test_fuse.py::test_random_graphs_give_the_same_bits_at_no_higher_peak": 8,
    "tests/passes/test_fuse.py::test_steps_have_the_bits_of_steps_without_groups": 3,
    "tests/passes/test_fuse_updates.py::test_members_of_kernels_have_the_bits_of_eager": 2,
    "tests/passes/test_fuse_updates.py::test_random_updates_leave_the_bits_of_operators": 6,
    "tests/passes/test_fuse_updates.py::test_updates_in_blocks_have_the_bits_of_eager": 2,
    "tests/passes/test_layout.py::test_random_graph_has_all_temporaries_in_the_arena_or_with_the_allocator": 6,
    "tests/passes/test_normalize.py::test_applied_twice_is_applied_once": 4,
    "tests/passes/test_normalize.py::test_random_graph_gives_the_same_bits_and_keeps_effects": 5,
    "tests/passes/test_placement.py::test_a_module_never_takes_more_than_the_allocator_would": 1,
    "tests/passes/test_placement.py::test_random_graph_splits_are_what_they_say": 8,
    "tests/passes/test_reorder.py::test_applied_twice_is_applied_once": 4,
    "tests/passes/test_reorder.py::test_random_graph_gives_the_same_bits_at_no_higher_peak": 8,
    "tests/passes/test_reuse.py::test_only_the_steps_own_tensors_are_written_over": 4,
    "tests/passes/test_reuse.py::test_random_graphs_keep_their_values_and_the_model_counts_right": 8,
    "tests/passes/test_trim.py::test_passes_with_trims_give_the_same_bits": 4,
    "tests/passes/test_trim.py::test_random_graphs_do_have_trims": 1,
    "tests/passes/test_trim.py::test_steps_with_trims_give_the_same_bits": 3,
    "tests/passes/test_shard.py::test_a_layer_gathers_and_scatters_as_often_as_megatrons": 1,
    "tests/passes/test_shard.py::test_a_layer_saves_the_bytes_of_the_paper": 1,
    "tests/passes/test_shard.py::test_loss_and_gradients_are_those_of_one_rank": 3,
    "tests/passes/test_shard.py::test_random_graphs_on_shards_give_what_they_gave": 8,
    "tests/planning/test_budget.py::test_lower_budgets_never_cost_less": 0,
    "tests/planning/test_budget.py::test_there_is_one_smallest_budget": 2,
    "tests/planning/test_other_orders.py::test_never_a_higher_peak_and_never_a_larger_arena": 2,
    "tests/planning/test_other_orders.py::test_the_foretold_memory_is_that_of_the_rewritten_graph": 2,
    "tests/planning/test_pipeline.py::test_budget_is_kept_without_other_passes": 1,
    "tests/planning/test_pipeline.py::test_every_shape_dtype_and_stride_is_derived_anew": 2,
    "tests/planning/test_pipeline.py::test_every_subset_of_passes_gives_the_same_bits": 1,
    "tests/planning/test_pipeline.py::test_program_of_a_random_graph_gives_the_bits_of_the_graph": 6,
    "tests/planning/test_plan.py::test_plan_with_reruns_gives_the_same_program_and_bits_on_a_fresh_capture": 2,
    "tests/planning/test_plan.py::test_round_trip_gives_an_equal_plan_and_the_same_text": 1,
    "tests/report/test_frontier.py::test_budgets_may_come_in_any_sequence": 1,
    "tests/report/test_frontier.py::test_curve_falls_and_never_lies_below_its_bound": 1,
    "tests/report/test_frontier.py::test_curve_is_made_of_plans": 1,
    "tests/report/test_frontier.py::test_ten_falling_budgets_have_no_higher_peak_and_no_less_time": 0,
    "tests/report/test_html.py::test_page_is_the_same_every_time": 0,
    "tests/report/test_html.py::test_script_finds_every_plot_of_the_page": 0,
    "tests/report/test_report.py::test_sums_hold_for_other_models": 1,
    "tests/solvers/order/test_portfolio.py::test_every_pair_of_switches": 15,
    "tests/solvers/retain/test_checkmate.py::test_as_few_seconds_as_the_integer_program": 6,
    "tests/solvers/retain/test_portfolio.py::test_judge_accepts_answers_for_training_graphs": 3,
    "tests/sweeps/test_databases.py::test_sample_of_entries": 1,
    "tests/sweeps/test_models.py::test_bits_of_torch_or_one_clear_refusal": 6,
    "tests/sweeps/test_models.py::test_bits_of_torch_where_modules_write_in_place": 6,
    "tests/sweeps/test_peaks.py::test_a_step_takes_no_more_than_eagers": 1,
}


def mark_thorough(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that are not in the first tier."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, kept in FIRST.items():
        of_test = cases.get(name, [])
        first = {round(number * len(of_test) / kept) for number in range(kept)} if kept else set()
        for number, item in enumerate(of_test):
            if number not in first:
                item.add_marker("thorough")
