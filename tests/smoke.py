"""Of every slow kind of test the ones that `make test` runs, beside the quick tests; `make slow` runs the
others."""

from __future__ import annotations

from pathlib import Path

import pytest

_LAYOUT = "contracts/test_sharded_backends.py::test_a_layout_of_two_matches_one_process"
_ON_WORKERS = "trainer/test_sharded_runs.py::test_a_run_on_workers_matches_one_process_which_can_resume_it"
SMOKE = {
    "command line": "cli/test_verbs.py::test_a_run_trains_evaluates_and_exports",
    "Ctrl-C": "cli/test_verbs.py::test_ctrl_c_saves_a_checkpoint_and_prints_the_resume_command",
    "kill": "resume/test_kill_and_resume.py::test_a_killed_run_of_a_simulator_equals_the_uninterrupted_one[tabletop]",
    "checks of tokens": "checks/test_zoo.py::test_a_bug_trips_its_check[the trainer ignores the temperature]",
    "checks of steps": "checks/test_zoo.py::test_a_bug_trips_its_check[divided by the number of passes]",
    "checks of resumes": "checks/test_zoo.py::test_a_bug_trips_its_check[a resume repeats prompts]",
    "silent checks": "checks/test_zoo.py::test_a_run_of_each_recipe_is_silent[ppo]",
    "learning": "learning/test_runs_learn.py::test_a_language_model_learns_to_write_one_letter[grpo]",
    "fsdp": f"{_LAYOUT}[fsdp]",
    "fsdp2": f"{_LAYOUT}[fsdp2]",
    "deepspeed": f"{_LAYOUT}[deepspeed]",
    "megatron": "contracts/test_megatron.py::test_a_layout_matches_one_process_and_either_resumes_from_the_other[tensor]",
    "Ray": f"{_ON_WORKERS}[collocated]",
    "death of a worker": "cluster/test_ray.py::test_a_worker_that_hangs_ends_its_group_at_the_deadline",
    "vllm": "contracts/test_engine.py::test_greedy_output_equals_the_trainers_after_each_weight_sync[vllm]",
    "engine server": "contracts/test_engine_servers.py::test_requests_of_a_hanging_server_move_to_the_others[sglang]",
    "weight sync": "weights/test_publication.py::test_every_engine_gets_the_weights_of_each_version[shared_memory]",
    "CUDA": "fake_cuda/test_suite.py::test_tests_pass_on_the_device[gpu/test_training.py-not nightly]",
    "architecture": "models/test_architectures.py::test_an_architecture_is_what_the_page_says[qwen3]",
    "agent": "trainer/test_agent_runs.py::test_a_run_of_agents_resumes_bit_exactly",
    "program as agent": "rollout/test_sessions.py::test_a_call_is_answered_in_openais_form_and_recorded_exactly",
    "MCP": "envs/test_mcp_tools.py::test_tools_of_a_server_are_called",
    "robot": "dialects/test_embodied_runs.py::test_two_rounds[metaworld]",
    "robot policy": "trainer/test_vla_runs.py::test_imitation_then_export",
    "sandbox": "rewards/test_attacks.py::test_an_honest_program_passes_after_them[bubblewrap]",
    "ordinary user": "isolation/test_ordinary_user.py::test_tests_pass_for_an_ordinary_user[isolation]",
}


def mark_smoke(items: list[pytest.Item], tests: Path, *, is_whole: bool) -> None:
    """Mark the items that are in the table. Raises UsageError if one is missing, where `items` are all tests
    of their files (`is_whole`)."""
    by_name = {f"{item.path.relative_to(tests)}::{item.name}": item for item in items}
    files = {name.split("::")[0] for name in by_name}
    for kind, name in SMOKE.items():
        if name in by_name:
            by_name[name].add_marker("smoke")
        elif is_whole and name.split("::")[0] in files:
            raise pytest.UsageError(f"tests/smoke.py, {kind}: there is no test {name}")
