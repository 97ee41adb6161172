"""The commands `plan` and `doctor`, which check whether a run fits on given devices or on this machine, and `report`, which creates a page about runs.

`plan` returns 1 if the run does not fit, and `doctor` returns 1 if training cannot start.
"""

import argparse
import errno
import os
import sys
from dataclasses import asdict, replace
from functools import partial

from dapo_jax.cli.arguments import CONFIG, Commands, add_config, add_overrides, command, option, write_json
from dapo_jax.config import ConfigError, load_config
from dapo_jax.config.keys import refuse
from dapo_jax.terminal import silent_libraries

PROGRAMS = ("generate", "prefill", "fill", "insert", "transfer", "update", "score")


def add_to(commands: Commands) -> None:
    """Adds the commands `plan`, `doctor` and `report` to the parser."""
    parser = command(commands, "plan", plan)
    add_config(parser)
    text = "TPU slice: v5p:4x4x8, v5p-256, v5litepod-64, v6e-8, ... (extra tpu), or NVIDIA GPUs: h100:8, h100x4:16 for machines of 4, ... (extra cuda-plan)"
    option(parser, "--topology", text, "T")
    text = "bandwidth of each GPU's network between machines, in Gbit/s (default 400)"
    option(parser, "--network", text, "GBIT", type=float)
    text = "mean response length (default: the limit)"
    option(parser, "--response-tokens", text, "MEAN[,STD]", type=_lengths)
    option(parser, "--prompt-tokens", "mean prompt length (default: the limit)", "MEAN", type=float)
    option(parser, "--informative", "fraction of groups that are informative", "SHARE", default=0.5)
    option(parser, "--turns", "mean turns per episode (default: environment.max_turns)", "MEAN", type=float)
    text = "devices of a sample worker, which has one host: v6e-8, h100:8, ...; v6e-4:2 for two workers (requires --topology and rollout.in_flight)"
    option(parser, "--samplers", text, "T[:COUNT]")
    text = "with --samplers: fraction of the roofline that the sample workers reach"
    option(parser, "--sampling-share", text, "SHARE", default=0.5)
    option(parser, "--update-share", "the same for the trainer", "SHARE", default=0.5)
    text = "with --samplers: bandwidth in Gbit/s with which the weights reach all sample workers"
    option(parser, "--transfer", text, "GBIT", default=10.0)
    option(parser, "--sweep", "try every mesh of fsdp x tensor, and rank the meshes that fit")
    text = "compile only programs whose names begin with this word; may be given several times (default all)"
    option(parser, "--only", text, "PROGRAM", action="append", choices=PROGRAMS)
    text = "time limit in seconds for the search for changes that make a run fit; 0: no search"
    option(parser, "--suggest-s", text, "SECONDS", default=600.0)
    option(parser, "--json", "also write JSON; -: to standard output, and tables to standard error", "FILE")
    parser = command(commands, "doctor", doctor)
    parser.add_argument("config", nargs="?", help=f"{CONFIG}; without it, only the machine is checked")
    add_overrides(parser)
    option(parser, "--full", "run the test step with the run's own model instead of a tiny model")
    option(parser, "--quick", "skip the test step")
    text = "format of a correct response for your own grader, for example '<result>{answer}</result>' (default: several formats are tried)"
    option(parser, "--right", text, "TEXT", default="")
    option(
        parser, "--json", "also write JSON; -: to standard output, and the table to standard error", "FILE"
    )
    parser = command(commands, "report", report)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, finished or still running")
    option(parser, "--out", "file for the page (default RUN/report.html of the first run)", "FILE")
    option(parser, "--png", "also write the figures as PNG files (extra report)", "FOLDER")
    option(parser, "--trace", "also write a trace of all steps for chrome://tracing or Perfetto", "FILE")
    text = "show rollouts of at most N logged steps and responses of at most N evaluations, evenly spaced (default all)"
    option(parser, "--rollout-steps", text, "N", type=int)
    text = "serve the page to a browser on this machine instead, and update it while the runs continue"
    option(parser, "--watch", text)
    option(parser, "--port", "with --watch: port on 127.0.0.1 (default: any free port)", "N", type=int)


def plan(arguments: argparse.Namespace) -> int:
    """Compute the memory, traffic and minimum time of a run, compiled for a TPU slice or NVIDIA GPUs."""
    config = load_config(arguments.config, arguments.overrides)
    from rich.console import Console

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # hides logs of the CUDA compiler
    with silent_libraries():
        from dapo_jax.plan import output, remedies, split, topologies
        from dapo_jax.plan import plan as planning
        from dapo_jax.plan.workload import Assumptions

    mean, std = arguments.response_tokens or (None, 0.0)
    assumed = Assumptions(
        response_tokens=mean,
        response_tokens_std=std,
        prompt_tokens=arguments.prompt_tokens,
        informative=arguments.informative,
        turns=arguments.turns,
        sampling_share=arguments.sampling_share,
        update_share=arguments.update_share,
        transfer_gbit_s=arguments.transfer,
    )
    width = None if sys.stdout.isatty() else 160
    console = Console(stderr=arguments.json == "-", width=width, highlight=False)
    say = partial(print, file=sys.stderr, flush=True)
    topology = topologies.parse(arguments.topology) if arguments.topology else None
    if (network := arguments.network) is not None:
        if topology is None or not topology.has_network or network <= 0:
            needs = "must be above 0, and needs GPUs on several machines, for example --topology h100:16"
            raise ConfigError(f"--network={network:g} {needs}")
        topology = replace(topology, network_bytes_s=network * 1e9 / 8)
    device, count = None, 0
    if arguments.samplers:
        if topology is None:
            raise ConfigError(f"--samplers {arguments.samplers} requires --topology, the trainer's devices")
        device, count = split.parse_workers(arguments.samplers, topology)
        config = split.with_samplers(config, count // topology.hosts)
    if arguments.sweep:
        if topology is None:
            raise ConfigError("--sweep compares meshes on a topology, so it requires --topology")
        swept = remedies.sweep(config, topology, assumed=assumed, only=arguments.only, say=say)
        output.show_sweep(swept, console)
        if arguments.json:
            write_json(arguments.json, output.swept_as_data(swept))
        return 0 if any(not isinstance(mesh_plan, str) for _, mesh_plan in swept) else 1
    result = planning.plan(config, topology=topology, assumed=assumed, only=arguments.only, say=say)
    seconds, tried = arguments.suggest_s, list[remedies.Tried]()
    if seconds and not result.fits:
        tried = remedies.suggestions(result, assumed=assumed, seconds=seconds, say=say)
    output.show(result, console)
    output.show_verdict(result, tried, console)
    alternatives = [{"overrides": list(change.overrides), "fits": change.fits} for change in tried]
    data, fits = {**output.as_data(result), "tried": alternatives}, result.fits
    if device is not None:
        options = {"assumed": assumed, "only": arguments.only, "say": say}
        worker = split.worker_plan(result, device, count, **options)
        output.show(worker, console)
        output.show_verdict(worker, [], console)
        divided = split.split(result, worker, assumed)
        output.show_split(divided, assumed, console)
        data |= {"sampler": output.as_data(worker), "split": asdict(divided)}
        fits = fits and worker.fits
    if arguments.json:
        write_json(arguments.json, data)
    return 0 if fits else 1


def _lengths(text: str) -> tuple[float, float]:
    """Parses response lengths: `MEAN`, or `MEAN,STD` with a standard deviation."""
    try:
        mean, _, std = text.partition(",")
        return float(mean), float(std or 0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be MEAN or MEAN,STD, in tokens") from error


def doctor(arguments: argparse.Namespace) -> int:
    """Check whether this machine can train this configuration."""
    if arguments.right and "{answer}" not in arguments.right:
        refuse("--right", arguments.right, "{answer} in it", "write it in place of the reference answer")
    config = load_config(arguments.config, arguments.overrides) if arguments.config else None
    from rich.console import Console

    from dapo_jax.doctor.examination import as_data, examination, show

    console = Console(stderr=arguments.json == "-")
    with console.status("starting") as status:
        findings = examination(
            config,
            full=arguments.full,
            quick=arguments.quick,
            right=arguments.right,
            before=lambda check: status.update(f"{check.name} ..."),
        )
    show(findings, console, configured=config is not None)
    data = as_data(findings, configured=config is not None)
    if arguments.json:
        write_json(arguments.json, data)
    return 0 if data["can_train"] else 1


def report(arguments: argparse.Namespace) -> int:
    """Create an HTML page with the curves, rollouts and configurations of runs. The page needs no network."""
    if arguments.watch:
        return _watch(arguments)
    if arguments.port is not None:
        raise ConfigError(f"--port {arguments.port} can only be used with --watch; an HTML file has no port")
    from dapo_jax.report import report
    from dapo_jax.storage import path_of

    page = report(*arguments.runs, rollout_steps=arguments.rollout_steps)
    try:
        out = page.save(arguments.out or path_of(arguments.runs[0]) / "report.html")
        print(f"{out}: {len(page.html.encode()) / 1e6:.1f} MB")
        if arguments.png:
            written = page.save_figures(arguments.png)
            print(f"{arguments.png}: {len(written)} PNGs")
        if arguments.trace:
            write_json(arguments.trace, page.trace, flag="--trace")
            print(f"{arguments.trace}: {len(page.trace['traceEvents'])} events")
    except (OSError, ValueError) as error:  # ValueError if a path is neither local nor in a bucket
        if isinstance(error, ConfigError) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(f"cannot write the report: {error}") from error
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    """Serves the report page until the command is interrupted."""
    from dapo_jax.report.server import watch

    for name in ("out", "png", "trace", "rollout_steps"):
        if getattr(arguments, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} {getattr(arguments, name)} is for a page that is written to a file, but --watch does not write a file: omit one of the two options"
            )
    watch(*arguments.runs, port=arguments.port or 0)
    return 0
