"""The command line: `braid VERB ...`.

Each verb loads the config and resolves the plan before it imports anything heavy, so that config errors are
reported at once.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from errno import EIO, ENOSPC
from os.path import isdir  # False for names that no file can have
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import braid
from braid.cluster.interrupts import NUMBERS, stop_signals
from braid.cluster.last_resort import ENDS_WITHIN_S
from braid.errors import (
    BraidError,
    ConfigError,
    DataError,
    ModelError,
    Problem,
    RunInterrupted,
    WorkerError,
    suggest,
)
from braid.processes import stacks_on_signal
from braid.report.streams import forgiven

if TYPE_CHECKING:
    from braid.config.load import Loaded
    from braid.plan import Plan, Verb
    from braid_dialects.load import Read

OK, FAILED, USAGE, MISSED, INTERRUPTED = 0, 1, 2, 3, 130

_HELP = """\
braid trains language models, agents and policies with reinforcement learning.
A run is described by one YAML file; key=value on the command line overrides any key of it.
Configs and scripts of RLinf, ROLL, SkyRL, verl and TRL run unchanged, with overrides in their own keys;
braid.KEY=VALUE sets a native key.

usage: braid COMMAND CONFIG.yaml [key=value ...]

commands:
{commands}

getting started:
  braid train examples/quickstart.yaml                        train a small model on arithmetic
  braid show examples/quickstart.yaml rollout.group_size=16   see the effect of a change before running it
  braid train examples/quickstart.yaml run.resume=latest      resume after an interruption

where to look:
  docs/config.md      config reference    RUN/summary.json      result of a run
  docs/dialects.md    other systems       RUN/samples/          sampled trajectories
  examples/           example configs     braid COMMAND --help  options of a command

exit codes: 0 finished, 1 the run failed, 2 invalid command, config, data or model,
3 eval.target was not reached, 130 interrupted
"""


_RUNS = ("train", "sft", "prefer", "eval")
"""Verbs that run something; the output of the others is their result."""
_WITH_CONFIG = (*_RUNS, "show", "plan", "explain", "convert")
"""Verbs that read a config."""
_BEFORE = "interrupted before the run began; nothing was written"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    with forgiven("stderr"):
        try:
            args = _parse(sys.argv[1:] if argv is None else argv)
        except SystemExit as end:  # argparse has printed the reason
            return end.code if isinstance(end.code, int) else USAGE
        with forgiven("stdout", only_encoding=args.verb_name not in _RUNS):
            code = guarded(args.run, args)
    return code if argv is not None else _leave(code, args)


def _leave(code: int, args: argparse.Namespace) -> int:
    """Flush the output streams and return the exit code of the process, ignoring signals from here on.

    A stream that cannot be written does not change the exit code of verbs that run something; for the other
    verbs, whose output is their result, an unwritable stdout is a failure."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)
    leaving = threading.Timer(ENDS_WITHIN_S, os._exit, [code])  # threads or objects may keep the interpreter
    leaving.daemon = True
    leaving.start()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if stream is sys.stdout and args.verb_name not in _RUNS and code == OK:
                return _say(FAILED, f"cannot write to standard output: {error.strerror}", args)
    return code


def guarded(action: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run `action` on `args` and return its exit code. Errors are printed to stderr, with a traceback under
    --debug; SIGTERM and SIGHUP act like Ctrl-C; unexpected exceptions propagate."""
    with stop_signals(ends_process=True):
        try:
            return action(args)
        except KeyboardInterrupt:
            return _say(INTERRUPTED, _BEFORE, args)
        except RunInterrupted as stop:
            return _say(INTERRUPTED, f"{stop}\nto resume: {_resume_command(args, stop)}", args)
        except ConfigError as error:
            return _say(USAGE, str(_placed(error, args)), args)
        except (DataError, ModelError) as error:
            return _say(USAGE, str(error), args)
        except BraidError as error:
            raised = error.raised if isinstance(error, WorkerError) else None
            code = USAGE if isinstance(raised, ConfigError | DataError | ModelError) else FAILED
            return _say(code, f"{type(error).__name__}: {error}", args)
        except BrokenPipeError:  # the reader of the pipe, such as `head`, has exited
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FAILED
        except OSError as error:
            if args.verb_name in _RUNS or error.filename is not None or error.errno not in (ENOSPC, EIO):
                raise
            return _say(FAILED, f"cannot write to standard output: {error.strerror}", args)
        except RuntimeError as error:  # Python 3.11 wraps exceptions raised during class creation
            if isinstance(error.__cause__, KeyboardInterrupt):
                return _say(INTERRUPTED, _BEFORE, args)
            raise


def _placed(error: ConfigError, args: argparse.Namespace) -> ConfigError:
    """The error with the origins of its keys, once the config has been read."""
    loaded: Loaded | None = getattr(args, "loaded", None)
    return error if loaded is None else ConfigError([loaded.placed(p) for p in error.problems])


def _run(args: argparse.Namespace) -> int:
    """Train, fine-tune or evaluate."""
    stacks_on_signal()
    loaded, plan = _load(args)
    from braid.trainer.cluster import launched

    with launched(loaded, plan) as cluster:
        from braid.trainer import commands  # heavy imports, which overlap with those of the workers

        if args.verb_name == "eval":
            run_dir = Path(args.config) if isdir(args.config) else None
            outcome = commands.evaluate(loaded, cluster, plan, run_dir=run_dir)
        else:
            run = {"sft": commands.sft, "prefer": commands.prefer}.get(plan.verb, commands.train)
            outcome = run(loaded, cluster, plan)
    if outcome.is_target_reached:
        return OK
    sys.stderr.write(f"braid: eval.target was not reached; see {outcome.run_dir / 'summary.json'}\n")
    return MISSED


def _init(args: argparse.Namespace) -> int:
    """Write a config, and say why it is as it is and what to run next."""
    from braid.cli.init import config_for
    from braid.config.load import load_config
    from braid.plan import resolve

    output = Path(args.output or f"{Path(args.data[0]).stem}.yaml")
    if output.exists():
        raise ConfigError([Problem("--output", f"{output} exists; choose another name, or remove it")])
    text, draft, num_rows = config_for(args.data, args.model, args.reward, output)
    _write(output, text)
    try:
        resolve(load_config(output).config, verb=draft.verb)
    except ConfigError:  # a reward that needs more than its kind
        output.unlink()
        raise
    show, run = f"braid show {output} --for {draft.verb} --check", f"braid {draft.verb} {output}"
    lines = [f"{num_rows:,} rows", *draft.reasons, f"wrote {output}; next:", f"  {show}", f"  {run}\n"]
    sys.stdout.write("\n".join(lines))
    return OK


def _step(text: str) -> int | str:
    """The value of `export --step`."""
    if text != "best" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor `best`")
    return text if text == "best" else int(text)


def _count(text: str) -> int:
    """The value of `plan --prompt-tokens`."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, such as 200")
    return int(text)


def _gib(text: str) -> float:
    """The value of `plan --device-memory`."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 2.0**40:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GiB, such as 80")
    return value


def _export(args: argparse.Namespace) -> int:
    run_dir = Path(args.run_dir)
    if not (run_dir / "config.yaml").is_file():
        what = "has no config.yaml, so it is not a run" if run_dir.is_dir() else "is not a folder"
        raise ConfigError(f"{run_dir} {what}; pass the folder of a run, such as runs/quickstart")
    output = None if args.output is None else Path(args.output)
    if args.report is not None:
        if output is not None or args.step is not None:
            raise ConfigError("--report is about the whole run; it takes no --output and no --step")
        from braid.inspection.view.report import write_report

        sys.stdout.write(f"{write_report(run_dir, Path(args.report))}\n")
        return OK
    from braid.trainer import commands

    sys.stdout.write(f"{commands.export(run_dir, output=output, step=args.step)}\n")
    return OK


def _show(args: argparse.Namespace) -> int:
    from braid.cli import show

    loaded, plan = _planned(args, args.verb)
    example = None
    if args.check:
        from braid.trainer.preflight import check

        plan, example = check(loaded, plan)
    if args.json:
        sys.stdout.write(show.as_json(loaded, plan, example))
    else:
        show.print_plan(loaded, plan, example, show_defaults=args.all, read_as=args.read_as)
    return OK


def _forecast(args: argparse.Namespace) -> int:
    """Print what a run needs, without starting it."""
    from braid.cli.plan import Measured, as_json, print_forecast
    from braid.plan.times import typical_lengths

    loaded, plan = _planned(args, args.verb)
    config, measured = loaded.config, None
    capacity = None if args.device_memory is None else round(args.device_memory * 2**30)
    if args.measure:
        lengths = typical_lengths(plan, args.prompt_tokens, args.answer_tokens)
        if plan.model_size is None or lengths is None or plan.verb != "train":
            why = "it needs `braid train` of a language model of known size, in a local folder or built"
            raise ConfigError(f"--measure: {why}; leave it out")
        from braid.trainer.rates import measure

        measured = Measured(measure(config, plan, lengths), lengths)
    elif args.prompt_tokens or args.answer_tokens:
        raise ConfigError("--prompt-tokens and --answer-tokens are lengths for times; add --measure")
    if args.json:
        sys.stdout.write(as_json(config, plan, capacity=capacity, measured=measured))
    else:
        print_forecast(config, plan, capacity=capacity, measured=measured)
    return OK


def _planned(args: argparse.Namespace, verb: Verb | None = None) -> tuple[Loaded, Plan]:
    """The config and its plan, for the command that the config is for unless `verb` names one. Raises
    ConfigError."""
    from braid.cluster.environment import environment
    from braid.plan import default_verb, resolve

    loaded, read = _read(args)
    args.loaded, args.read_as = loaded, "" if read is None else _read_as(read)
    verb = verb or default_verb(loaded.config)
    with environment(loaded.config.cluster.variables):  # as of a run
        return loaded, resolve(loaded.config, verb=verb, origin_of=loaded.origin)


def _explain(args: argparse.Namespace) -> int:
    """Print the ledger, and whether the plan that `braid show` prints can be made: the exit code is that of
    `show`."""
    from braid.cli.explain import print_key, print_ledger
    from braid_dialects.load import Refused, ledger_text

    if args.key is not None:
        print_key(args.key)
        return OK
    if args.config is None:
        raise ConfigError("pass a config to explain, or --key KEY for a single key")
    if _is_key(args.config):
        key = args.config.partition("=")[0]
        raise ConfigError(f"{args.config} is not a file; to explain a key: braid explain --key {key}")
    allowed, args.allow_unsupported = args.allow_unsupported, ["*"]
    try:
        _, translation = _read(args)
    except Refused as error:
        translation = error
    if translation is None:
        raise ConfigError(f"{args.config} is a native config; use: braid show {args.config}")
    if args.json:
        sys.stdout.write(ledger_text(translation.ledger))
    else:
        print_ledger(
            translation.ledger,
            title=f"{Path(args.config).name} ({translation.title})",
            note=translation.version_from,
        )
    sys.stdout.flush()
    args.allow_unsupported, code, outcome = allowed, OK, "ok"
    try:
        _planned(args)
    except ConfigError as error:
        error = _placed(error, args)
        code = _say(USAGE, str(error), args)
        first, num_more = error.problems[0], len(error.problems) - 1
        outcome = f"refused because {first.key}: {first.message}" + f" (and {num_more} more)" * bool(num_more)
    (sys.stderr if args.json else sys.stdout).write(f"plan: {outcome}\n")
    return code


def _is_key(text: str) -> bool:
    """Whether an argument looks like a config key, perhaps with a value, and like no file here."""
    key = text.partition("=")[0]
    is_file = Path(text).exists() or suggest(text, os.listdir()) or key.endswith((".yaml", ".yml", ".sh"))
    return not is_file and re.fullmatch(r"[\w-]+(\.[\w-]+)*", key) is not None


def _convert(args: argparse.Namespace) -> int:
    from braid.cli.convert import native_text

    _, read = _read(args)
    if read is None:
        raise ConfigError(f"{args.config} is already a native config")
    output = None if args.output is None else Path(args.output)
    text = native_text(read, None if output is None else output.parent)
    if output is None:
        sys.stdout.write(text)
        return OK
    _write(output, text)
    return OK


def _write(output: Path, text: str) -> None:
    try:
        output.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}; choose another --output") from error


def _list(args: argparse.Namespace) -> int:
    from braid.cli.look import print_runs

    print_runs([Path(folder) for folder in args.folders], as_json=args.json)
    return OK


def _samples(args: argparse.Namespace) -> int:
    from braid.cli.look import Choice, Order, print_samples
    from braid.inspection.folder import open_run

    orders: tuple[Order, ...] = ("first", "best", "worst")
    asked: dict[Order, int] = {name: most for name in orders if (most := getattr(args, name)) is not None}
    order, most = next(iter(asked.items()), (orders[0], 3))
    if most < 1:
        raise ConfigError(f"--{order} {most}: print at least 1")
    choice = Choice(
        stage="round" if args.eval is None else "eval",
        number=args.round if args.eval in (None, -1) else args.eval,
        order=order,
        most=most,
        status=args.status,
        source=args.source,
        uid=args.uid,
        contains=args.contains,
    )
    print_samples(open_run(Path(args.run_dir)), choice, is_whole=args.full, as_json=args.json)
    return OK


def _compare(args: argparse.Namespace) -> int:
    from braid.cli.look import print_comparison
    from braid.inspection.folder import open_run

    runs = [open_run(Path(folder)) for folder in args.run_dirs]
    print_comparison(runs, numbers=args.eval, num_most=args.most)
    return OK


def _diagnose(args: argparse.Namespace) -> int:
    from braid.cli.look import print_diagnosis
    from braid.inspection.folder import open_run

    print_diagnosis(open_run(Path(args.run_dir)), as_json=args.json)
    return OK


def _view(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C or SIGTERM."""
    from braid.inspection.folder import find_runs, open_run
    from braid.inspection.view.answers import Answers
    from braid.inspection.view.server import Server

    runs = [run for folder in args.run_dirs for run in find_runs(Path(folder))]
    if not runs:
        open_run(Path(args.run_dirs[0]))
        raise ConfigError(f"there is no run in {' '.join(args.run_dirs)}; pass the folder of a run")
    answers = Answers([run.path for run in runs])
    try:
        server = Server(answers, args.port)
    except (OSError, OverflowError) as error:
        message = f"--port {args.port}: {error}; choose another, or leave it out to take a free one"
        raise ConfigError(message) from None
    sys.stdout.write(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} at {server.url}\nCtrl-C ends it\n")
    sys.stdout.flush()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return OK
    finally:
        server.server_close()
    return OK


def _doctor(args: argparse.Namespace) -> int:
    from braid.cli.doctor import examine, print_report

    lines = examine(model=args.model, trials=not args.quick)
    return OK if print_report(lines, as_json=args.json) else FAILED


def _schema(args: argparse.Namespace) -> int:
    from braid.config.json_schema import schema_text
    from braid.config.reference import reference_text

    sys.stdout.write(reference_text() if args.markdown else schema_text())
    return OK


def _completion(args: argparse.Namespace) -> int:
    from braid.cli.completion import script

    options = {
        name: [option for action in verb._actions for option in action.option_strings]
        for name, verb in args.verbs.items()
    }
    sys.stdout.write(script(args.shell, options, _WITH_CONFIG))
    return OK


def _load(args: argparse.Namespace) -> tuple[Loaded, Plan]:
    """Load and check the config of a verb that runs something, and print its warnings. Also stores it in
    `args`, so that problems found later can be reported with their origin."""
    from braid.plan import default_verb, resolve

    loaded, read = _read(args)
    args.loaded, args.language = loaded, "native" if read is None else read.language
    verb = args.verb_name
    if verb == "train" and (loaded.config.run.eval_only or read is not None):
        verb = default_verb(loaded.config)  # files of other systems do not name a command
    if read is not None and (read_as := _read_as(read)):
        sys.stderr.write(f"braid: {read_as}\n")
    os.environ.update(loaded.config.cluster.variables)  # before the import of torch, which reads some of them
    plan = resolve(loaded.config, verb=verb, origin_of=loaded.origin)
    for warning in plan.warnings:
        sys.stderr.write(f"braid: warning: {warning}\n")
    return loaded, plan


def _read_as(read: Read) -> str:
    """The version of the system that the config is of; empty where versions do not differ."""
    return f"read as a config of {read.title} ({read.version_from})" if read.version_from else ""


def _read(args: argparse.Namespace) -> tuple[Loaded, Read | None]:
    """The config, and how it was translated if it is another system's. A native config never loads the
    dialects."""
    from braid.config.load import load_config
    from braid.config.run_folder import file_of
    from braid.config.schema import RunConfig
    from braid.config.source import read_file

    path, dialect = file_of(Path(args.config)), args.dialect
    chosen = {"backend": args.backend, "engine": args.engine}
    is_yaml = path.suffix not in (".sh", ".py")
    if dialect == "native" or (
        dialect is None and is_yaml and set(read_file(path).tree) <= set(RunConfig.model_fields)
    ):
        return load_config(path, args.overrides, **chosen), None
    from braid_dialects.load import read_config

    read = read_config(path, args.overrides, dialect=dialect, allowed=args.allow_unsupported, **chosen)
    return read.loaded, None if read.language == "native" else read


class _Parser(argparse.ArgumentParser):
    """An argument parser that suggests commands for mistyped ones."""

    def error(self, message: str) -> NoReturn:
        if "argument VERB: invalid choice" in message:
            wrong = message.split("'")[1]
            hint = suggest(wrong, _VERBS) or "; the commands are " + ", ".join(_VERBS)
            if wrong.endswith((".yaml", ".yml")):
                hint = f", did you mean 'braid train {wrong}'?"
            message = f"unknown command {wrong!r}{hint}"
        elif message.startswith("the following arguments are required: "):
            message = f"missing argument {message.split(': ')[1].split(',')[0]}"
        sys.stderr.write(f"braid: {message}\ntry: {self.prog} --help\n")
        raise SystemExit(USAGE)


_VERBS: dict[str, tuple[Callable[[argparse.Namespace], int], str]] = {
    "train": (_run, "Reinforcement learning, after supervised fine-tuning if `sft` is set."),
    "sft": (_run, "Supervised fine-tuning on the examples of `sft.data`."),
    "prefer": (
        _run,
        "Learning from the preference pairs of `prefer.data`: DPO, or a reward model.",
    ),
    "eval": (_run, "Evaluate a model, or the newest checkpoint of a run, on `data.eval`."),
    "show": (
        _show,
        "Print the config with the origins of its values, and the plan; --check also checks data and models.",
    ),
    "plan": (
        _forecast,
        "Say what a run needs before it is run: memory by device, role and part, disk, and what limits.",
    ),
    "explain": (
        _explain,
        "Show how each key of a config of RLinf, ROLL, SkyRL, verl or TRL, or one --key, is translated.",
    ),
    "convert": (_convert, "Convert a config of RLinf, ROLL, SkyRL, verl or TRL to a native one."),
    "init": (_init, "Write a config for a model and a file of data, from what is in the file."),
    "export": (
        _export,
        "Export a checkpoint in Hugging Face format; --report: the run as one HTML file.",
    ),
    "ls": (_list, "List the runs in a folder: status, rounds, reward, first and last evaluation."),
    "samples": (
        _samples,
        "Print trajectories of a round or an evaluation: the best, the worst, those with a text.",
    ),
    "compare": (_compare, "Compare runs: configs, metrics, and answers to the same prompts."),
    "diagnose": (
        _diagnose,
        "Say what is wrong with a run, since when, the likeliest causes, and the key to change.",
    ),
    "view": (
        _view,
        "Show runs as a page in the browser: curves, trajectories and their tokens, evaluations, configs.",
    ),
    "doctor": (
        _doctor,
        "Say whether this machine can run braid, and train two rounds on each installed backend and engine.",
    ),
    "schema": (_schema, "Print the JSON schema of the config, for completion in editors."),
    "completion": (_completion, "Print a script that completes commands, files and config keys in a shell."),
}


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="braid", usage="braid VERB ...", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--version", action="version", version=f"braid {braid.__version__}")
    verbs = parser.add_subparsers(dest="verb_name", metavar="VERB")
    for name, (run, text) in _VERBS.items():
        verb = verbs.add_parser(name, prog=f"braid {name}", description=text, allow_abbrev=False)
        verb.add_argument("--debug", action="store_true", help="print tracebacks of errors")
        verb.set_defaults(run=run)
        if name in _WITH_CONFIG:
            _add_config(verb, is_optional=name == "explain")
    show, plan, explain, convert, export, schema = (
        verbs.choices[name] for name in ("show", "plan", "explain", "convert", "export", "schema")
    )
    show.add_argument("--all", action="store_true", help="also show default values")
    show.add_argument(
        "--check",
        action="store_true",
        help="also read the data, call each reward on an example, and check that models and packages exist, "
        "as train does before it starts",
    )
    for verb in (show, plan):
        verb.add_argument("--for", dest="verb", choices=_RUNS, help="plan for this command")
    plan.add_argument(
        "--device-memory",
        type=_gib,
        metavar="GIB",
        help="memory of each device in GiB; that of this machine by default",
    )
    plan.add_argument(
        "--measure",
        action="store_true",
        help="also measure steps and sampling on this machine, for the time of a round (half a minute)",
    )
    for name in ("prompt", "answer"):
        plan.add_argument(
            f"--{name}-tokens",
            type=_count,
            metavar="N",
            help=f"typical length of {name}s, for times; the longest possible by default",
        )
    for verb in (show, plan, explain):
        verb.add_argument("--json", action="store_true", help="print JSON")
    explain.add_argument("--key", metavar="KEY", help="explain one key in each config format that has it")
    convert.add_argument("--output", metavar="FILE", help="output file; standard output by default")
    init = verbs.choices["init"]
    init.add_argument("data", nargs="+", metavar="DATA", help=".jsonl, .json, .csv or .parquet files")
    init.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="folder of a model, .gguf file, or its name on the hub",
    )
    init.add_argument(
        "--reward", metavar="KIND", help="kind of the reward, or FILE.py:FUNCTION; guessed by default"
    )
    init.add_argument(
        "--output", metavar="FILE", help="config to write; DATA's name with .yaml, here, by default"
    )
    export.add_argument("run_dir", metavar="RUN", help="folder of a run")
    export.add_argument("--output", metavar="DIR", help="output folder; RUN/export by default")
    export.add_argument(
        "--step",
        type=_step,
        metavar="N",
        help="step of the checkpoint, or `best` for that of the best evaluation; the newest by default",
    )
    export.add_argument(
        "--report", metavar="FILE.html", help="write the page of braid view as one file instead of a model"
    )
    _add_looks(verbs.choices)
    doctor = verbs.choices["doctor"]
    doctor.add_argument("--quick", action="store_true", help="look only, train nothing")
    doctor.add_argument("--model", metavar="FOLDER", help="also load a model's tokenizer and chat template")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    completion = verbs.choices["completion"]
    completion.add_argument(
        "shell",
        choices=("bash", "zsh", "fish"),
        help="bash and zsh: source <(braid completion SHELL); fish: braid completion fish | source",
    )
    completion.set_defaults(verbs=verbs.choices)
    schema.add_argument("--markdown", action="store_true", help="print the Markdown reference instead")
    args, extra = parser.parse_known_args(argv)
    if args.verb_name is None:
        lines = [f"  {name:<10} {text}" for name, (_, text) in _VERBS.items()]
        sys.stdout.write(_HELP.format(commands="\n".join(lines)))
        raise SystemExit(OK if args.help or not argv else USAGE)
    _take_extra(args, extra, verbs.choices[args.verb_name])
    return args


def _take_extra(args: argparse.Namespace, extra: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Accept overrides after options; any other leftover argument is an error."""
    for text in extra:
        if not text.startswith("-") and hasattr(args, "overrides"):
            args.overrides.append(text)
        elif "=" in text:
            parser.error(f"unknown option {text!r}; overrides have no dashes: {text.lstrip('-')}")
        else:
            parser.error(f"unknown option {text!r}")


def _add_config(verb: argparse.ArgumentParser, *, is_optional: bool) -> None:
    """Add the arguments of the verbs that read a config."""
    verb.add_argument(
        "config",
        metavar="CONFIG.yaml",
        nargs="?" if is_optional else None,
        help="config file, or the folder of a run to use its config",
    )
    verb.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="overrides in the keys of the config, for example run.seed=1 data.train.0.size=5; with a "
        "config of RLinf, ROLL, SkyRL, verl or TRL, braid.KEY=VALUE sets a native key, for example "
        "braid.run.max_rounds=2",
    )
    verb.add_argument(
        "--dialect",
        metavar="{native,rlinf,roll,skyrl,verl,trl,skyrl@VERSION,...}",
        help="format of the config, and the version whose defaults apply; detected from its keys by default",
    )
    verb.add_argument("--backend", metavar="NAME", help="override the training backend; single: one process")
    verb.add_argument("--engine", metavar="NAME", help="override the rollout engine; native: braid's own")
    verb.add_argument(
        "--allow-unsupported",
        action="append",
        default=[],
        metavar="KEY",
        help="ignore this unsupported key or section of the config; may be repeated",
    )


def _add_looks(verbs: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of the verbs that look at runs."""
    listing, samples, compare, diagnose = (verbs[name] for name in ("ls", "samples", "compare", "diagnose"))
    view = verbs["view"]
    view.add_argument(
        "run_dirs",
        metavar="RUN",
        nargs="*",
        default=["runs"],
        help="runs, or folders with runs; runs by default",
    )
    view.add_argument("--port", type=int, metavar="N", default=0, help="port; a free one by default")
    listing.add_argument("folders", metavar="FOLDER", nargs="*", default=["runs"], help="runs by default")
    for verb in (samples, diagnose):
        verb.add_argument("run_dir", metavar="RUN", help="folder of a run")
    compare.add_argument(
        "run_dirs", metavar="RUN", nargs="+", help="folders of runs; of one, its first and last evaluation"
    )
    stage = samples.add_mutually_exclusive_group()
    stage.add_argument("--round", type=int, metavar="N", help="a round of training; the last by default")
    stage.add_argument(
        "--eval", type=int, metavar="N", nargs="?", const=-1, help="the evaluation after round N, or the last"
    )
    order = samples.add_mutually_exclusive_group()
    for name in ("first", "best", "worst"):
        order.add_argument(
            f"--{name}", type=int, metavar="K", help=f"print the {name} K; the first 3 by default"
        )
    samples.add_argument("--status", choices=("finished", "truncated", "invalid"), help="only those")
    samples.add_argument("--source", metavar="NAME", help="only prompts of this source")
    samples.add_argument("--uid", metavar="UID", help="only this prompt")
    samples.add_argument("--contains", metavar="TEXT", help="only those with this text, in any case")
    samples.add_argument("--full", action="store_true", help="print long texts whole")
    compare.add_argument(
        "--eval",
        type=int,
        metavar="N",
        nargs="+",
        default=[],
        help="rounds of the evaluations to compare, one for all or one each; the last by default",
    )
    compare.add_argument("--most", type=int, metavar="K", default=5, help="print K prompts that changed most")
    for verb in (listing, samples, diagnose):
        verb.add_argument("--json", action="store_true", help="print JSON")


def _resume_command(args: argparse.Namespace, stop: RunInterrupted) -> str:
    """The command that resumes the run; without a checkpoint, it starts the run again in the same folder."""
    prefix = "" if args.language == "native" else "braid."
    settings = {f"{prefix}run.name": stop.run_dir.name, f"{prefix}run.resume": "latest"}
    overrides = [text for text in args.overrides if text.partition("=")[0] not in settings]
    overrides += [f"{key}={value}" for key, value in settings.items()]
    options = [(f"--{name}", getattr(args, name)) for name in ("dialect", "backend", "engine")]
    options += [("--allow-unsupported", key) for key in args.allow_unsupported]
    flags = [part for option in options if option[1] is not None for part in option]
    return shlex.join(["braid", args.verb_name, args.config, *overrides, *flags])


def _say(code: int, message: str, args: argparse.Namespace) -> int:
    if args.debug and code in (FAILED, USAGE):
        traceback.print_exc()
    else:
        sys.stderr.write(f"braid: {message}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
