"""Which words the real clients take: what the stubs refuse, the clients would.

gcloud's are from the help of Google Cloud SDK 528, XPK's from that of 1.16.0, kubectl's from 1.32; Slurm's are
those that its manual pages document. Only the commands and, for Slurm, the flags that the launch scripts and the pages use are here.
"""

TPU_WIDE = {"project", "zone", "format"}
SSH = {"ssh-key-file", "strict-host-key-checking", "worker", "ssh-key-expiration", "ssh-key-expire-after"}
SSH_BARE = {"dry-run", "force-key-file-overwrite", "internal-ip", "plain", "quiet"}
XPK_WIDE = {"project", "project-number", "zone", "namespace"}
XPK_BARE = {"dry-run", "skip-validation", "quiet"}


class Form:
    """What one command takes. No dataclass: a stub starts often, and importing them takes as long as all the rest."""

    def __init__(self, *, values, bare=frozenset(), required=frozenset(), words=(0, 0)):
        """Flags with a value and without, flags that must be there, and how many words that are no flags (least, most)."""
        self.values, self.bare, self.required, self.words = values, bare, required, words


FORMS = {
    ("gcloud", "compute", "tpus", "queued-resources", "create"): Form(
        values=TPU_WIDE
        | {"runtime-version", "accelerator-type", "topology", "type", "node-id", "node-count", "node-prefix"}
        | {
            "data-disk",
            "description",
            "labels",
            "metadata",
            "metadata-from-file",
            "network",
            "range",
            "scopes",
        }
        | {"service-account", "subnetwork", "tags", "valid-after-duration", "valid-after-time"}
        | {"valid-until-duration", "valid-until-time", "reservation-host-folder"}
        | {"reservation-host-organization", "reservation-host-project"},
        bare={"async", "guaranteed", "internal-ips", "reserved", "shielded-secure-boot", "spot", "quiet"},
        required={"runtime-version", "accelerator-type", "node-id", "zone"},
        words=(1, 1),
    ),
    ("gcloud", "compute", "tpus", "queued-resources", "describe"): Form(
        values=TPU_WIDE, bare={"quiet"}, required={"zone"}, words=(1, 1)
    ),
    ("gcloud", "compute", "tpus", "queued-resources", "delete"): Form(
        values=TPU_WIDE, bare={"async", "force", "quiet"}, required={"zone"}, words=(1, 1)
    ),
    ("gcloud", "compute", "tpus", "tpu-vm", "ssh"): Form(
        values=TPU_WIDE | SSH | {"ssh-flag", "command", "output-directory"},
        bare=SSH_BARE,
        required={"zone", "command"},
        words=(1, 1),
    ),
    ("gcloud", "compute", "tpus", "tpu-vm", "scp"): Form(
        values=TPU_WIDE | SSH | {"scp-flag"},
        bare=SSH_BARE | {"compress", "recurse"},
        required={"zone"},
        words=(2, 99),
    ),
    ("gcloud", "storage", "buckets", "create"): Form(
        values={"project", "location", "default-storage-class", "soft-delete-duration"},
        bare={"uniform-bucket-level-access", "public-access-prevention"},
        words=(1, 99),
    ),
    ("gcloud", "storage", "cat"): Form(values={"project", "range"}, bare={"display-url"}, words=(1, 99)),
    ("gcloud", "storage", "rm"): Form(values={"project"}, bare={"recursive", "all-versions"}, words=(1, 99)),
    ("xpk", "workload", "create"): Form(
        values=XPK_WIDE
        | {"command", "tpu-type", "device-type", "storage", "num-nodes", "scheduler", "ramdisk-directory"}
        | {"debug-dump-gcs", "restart-on-exit-codes", "workload", "cluster", "docker-name", "num-slices"}
        | {"priority", "max-restarts", "ttl-seconds-after-finished", "termination-grace-period-seconds"}
        | {"env-file", "env", "base-docker-image", "script-dir", "docker-image", "docker-image-pull-secret"}
        | {"output-manifest-file", "experiment-name", "reservation"},
        bare=XPK_BARE | {"deploy-stacktrace-sidecar", "enable-debug-logs", "on-demand", "spot", "flex"},
        required={"command", "tpu-type", "workload", "cluster"},
    ),
    ("xpk", "workload", "delete"): Form(
        values=XPK_WIDE | {"cluster", "workload", "filter-by-job", "filter-by-status"},
        bare=XPK_BARE | {"force"},
        required={"cluster", "workload", "force"},
    ),
    ("kubectl", "logs"): Form(
        values={"container", "limit-bytes", "max-log-requests", "pod-running-timeout", "selector", "since"}
        | {"since-time", "tail", "namespace"},
        bare={"all-containers", "all-pods", "follow", "ignore-errors", "prefix", "previous", "timestamps"},
        words=(0, 1),
    ),
    ("scontrol", "requeue"): Form(values=set(), words=(1, 1)),
    ("scancel",): Form(values={"signal"}, words=(1, 1)),
    ("squeue",): Form(values={"jobs", "format", "user", "states"}, bare={"noheader"}),
    # What a worker of a slice runs.
    ("curl",): Form(values=set(), bare={"LsSf"}, words=(1, 1)),
    ("uv", "venv"): Form(values={"python"}, bare={"quiet"}, words=(1, 1)),
    ("uv", "pip", "install"): Form(
        values={"python", "constraint", "reinstall-package"}, bare={"quiet"}, words=(1, 1)
    ),
}
SRUN = {
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "cpus-per-task",
    "gpus-per-node",
    "cpu-bind",
    "kill-on-bad-exit",
} | {
    "wait",
    "export",
    "label",
}
SBATCH = {
    "nodes",
    "gpus-per-node",
    "time",
    "partition",
    "account",
    "job-name",
    "output",
    "open-mode",
    "signal",
} | {"ntasks-per-node"}
SBATCH_BARE = {"exclusive", "requeue"}


class UnknownWordError(ValueError):
    """The client would refuse this command."""


def read(words: list[str]) -> tuple[tuple[str, ...], dict[str, list[str]], list[str]]:
    """The command, its flags with their values, and the words that are no flags.

    Raises:
        UnknownWordError: no client of the real ones takes this.
    """
    found = [command for command in FORMS if tuple(words[: len(command)]) == command]
    if not found:
        raise UnknownWordError(f"Invalid choice: {' '.join(words[:5])}")
    command = found[0]
    form = FORMS[command]
    flags, rest = split(words[len(command) :], form.values, form.bare)
    missing = set(form.required) - set(flags)
    if missing:
        raise UnknownWordError(f"argument --{sorted(missing)[0]}: Must be specified")
    least, most = form.words
    if not least <= len(rest) <= most:
        raise UnknownWordError(f"unrecognized arguments: {rest}")
    return command, flags, rest


def split(
    words: list[str], values: set[str], bare: frozenset[str] | set[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """Flags with their values, and the other words."""
    flags: dict[str, list[str]] = {}
    rest = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-"):
            rest.append(word)
        elif name in bare and not equals:
            flags.setdefault(name, []).append("")
        elif name in values and (equals or left):
            flags.setdefault(name, []).append(value if equals else left.pop(0))
        else:
            raise UnknownWordError(f"unrecognized arguments: {word}")
    return flags, rest
