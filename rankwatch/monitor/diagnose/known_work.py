"""The table of known work: which frame of which library means that a rank loads data, saves, transfers, or is held by a person.

An entry tells the library's own file and function, never a name that a job could have given. A frame counts only while no code of the
job runs inside it (a sweep's agent, a debugger at the bottom of the stack), unless the entry says that such code is part of the work.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from rankwatch.model import Domain

Work = Literal["debugger", "collective", "data_loading", "checkpointing", "external_io", "compiling", "noted"]
PRECEDENCE: tuple[Work, ...] = ("debugger", "collective", "data_loading", "checkpointing", "external_io", "compiling", "noted")


@dataclass(frozen=True, slots=True)
class Known:
    """One entry. file: searched in the frame's path; functions: must match the whole bare name, "" is any.

    does: what a rank does there, as a clause after "it". over_user: the job's own code may run inside and belongs to the work.
    wrapper: a framework's method around the work; what is found further in says more.
    """

    kind: Work
    file: str
    functions: str = ""
    does: str = ""
    over_user: bool = False
    wrapper: bool = False
    domain: Domain = "user_code"


_STDLIB = r"(<stdlib>|/lib/python3[^/]*)/"
_SITE = r"(site|dist)-packages/"  # a job may have a folder of its own that is named like a library
_TREE = r"((site|dist)-packages|/src)/"  # also as a checkout
_LIGHTNING = _TREE + r"(lightning/(pytorch|fabric)|pytorch_lightning|lightning_fabric)/"
_WAITS, _SAVES, _WRITES, _READS = "waits for its next batch", "writes or reads a checkpoint", "writes a checkpoint", "reads a checkpoint"
_CARRIES = "waits for a transfer over the network"


def _any(names: str) -> str:
    """One of these words."""
    return f"({'|'.join(names.split())})"


def _package(names: str) -> str:
    """A path inside one of these installed packages (`boto3 google/cloud/storage`)."""
    return rf"{_SITE}{_any(names)}(/|\.py$)"


FILELOCK = _package("filelock")
FILE_BATON = r"torch/utils/file_baton\.py$"


def _person(file: str, functions: str = "", does: str = "is in a debugger") -> Known:
    return Known("debugger", file, functions, does)


def _data(file: str, functions: str = "") -> Known:
    """With num_workers=0 the dataset's own code runs inside."""
    return Known("data_loading", file, functions, _WAITS, over_user=True, domain="storage")


def _save(file: str, functions: str = "", does: str = _SAVES, *, over_user: bool = False) -> Known:
    return Known("checkpointing", file, functions, does, over_user=over_user, domain="storage")


def _saver(file: str, functions: str = "", does: str = _SAVES) -> Known:
    """A framework's method: the job's own hooks run inside."""
    return Known("checkpointing", file, functions, does, over_user=True, wrapper=True, domain="storage")


def _outside(file: str, functions: str = "", does: str = _CARRIES, domain: Domain = "network", *, over_user: bool = False) -> Known:
    return Known("external_io", file, functions, does, over_user=over_user, domain=domain)


TABLE: tuple[Known, ...] = (
    # -- held by a person: the prompt itself; a debugger that only started the script stands below the job's frames
    _person(_STDLIB + r"(pdb|bdb)\.py$", r"(?!(main|run|_run\w*|runctx|runeval|runcall|trace_dispatch|dispatch_\w+)$).*"),
    _person(_package("ipdb pudb rpdb remote_pdb web_pdb pdbpp celery/contrib/rdb")),
    _person(r"(^|/)(debugpy|pydevd|_pydevd_bundle|pydevd_\w+)(/|\.py$)", r"(_?do_wait_suspend|wait_for_client|notify_\w*suspended\w*|settrace)"),
    _person(_SITE + r"IPython/(core/debugger|terminal/(embed|debugger|interactiveshell))\.py$", does="is in an interactive shell"),
    _person(_STDLIB + r"(code|_pyrepl/\w+)\.py$", _any("interact raw_input readline input push multiline_input"), "is in an interactive shell"),
    _person(r"torch/distributed/__init__\.py$", _any("breakpoint interaction")),
    # -- in a collective: it waits for others itself, whatever it does so for
    Known(
        "collective",
        r"torch/distributed/distributed_c10d\.py$",
        r"_?(all_?reduce|all_?gather|all_?to_?all|reduce|gather|scatter|broadcast|barrier|monitored_barrier|send|recv|isend|irecv|batch_isend_irecv)"
        r"(_into_tensor|_tensor|_scatter|_scatter_base|_base|_object|_object_list|_list|_single|_coalesced|_multigpu|_scatter_tensor)*",
    ),
    Known("collective", r"torch/distributed/(_functional_collectives(_impl)?|nn/functional)\.py$", r"wait_tensor|_?all_\w+|reduce_\w+|broadcast"),
    # -- data: the loader waits for workers, or runs the dataset's own code
    _data(
        r"torch/utils/data/(dataloader\.py|_utils/(fetch|pin_memory|collate)\.py)$",
        _any("_try_get_data _get_data _next_data __next__ __iter__ _shutdown_workers _try_put_index _get_iterator _reset fetch __init__ collate pin_memory"),
    ),
    _data(r"torch/utils/data/(datapipes/|(sampler|dataset)\.py$)", _any("__iter__ __next__ __getitem__ __getitems__ wrap_next wrap_generator")),
    _data(_package("torchdata webdataset wids litdata ffcv squirrel deeplake dali nvidia/dali megatron/energon")),
    _data(_SITE + r"streaming/base/(dataset|dataloader|stream|batching|storage|shared|partition|shuffle|world|format)"),
    _data(_SITE + r"grain/", r"__next__|__iter__|_?get\w*|_?next\w*|read\w*|fetch\w*|\w*iterator\w*"),
    _data(_SITE + r"tensorflow/python/data/ops/(iterator_ops|dataset_ops)\.py$", _any("__next__ _next_internal next get_next __iter__ _create_iterator")),
    _data(_SITE + r"tensorflow_datasets/core/", _any("__next__ __iter__ _eager_dataset_iterator read __getitem__ __getitems__")),
    _data(_SITE + r"datasets/iterable_dataset\.py$", r"_?_?iter\w*|__next__|next"),
    _data(r"(^|/)megatron/(core|legacy)/datasets/", r"__getitem__|__iter__|__next__|get|_query_document\w*"),
    _data(_TREE + r"accelerate/data_loader\.py$", r"__iter__|_fetch_batches|__next__|_iter_with_\w+"),
    _data(_LIGHTNING + r"(loops/fetchers|utilities/combined_loader)\.py$", _any("__next__ __iter__ _fetch_next_batch setup reset")),
    _data(_TREE + r"transformers/trainer\.py$", "get_batch_samples"),
    _data(r"(^|/)deepspeed/runtime/(dataloader|data_pipeline/[\w/]+)\.py$", _any("__next__ __iter__ _create_dataloader")),
    # -- checkpoints
    _save(r"torch/serialization\.py$", _any("save _save _legacy_save write_record persistent_id"), _WRITES, over_user=True),
    _save(r"torch/serialization\.py$", _any("load _load _legacy_load load_tensor persistent_load find_class"), _READS, over_user=True),
    _save(r"torch/jit/_serialization\.py$", _any("save load"), "writes or reads a model"),
    _save(r"torch/distributed/(_shard/)?checkpoint/state_dict_loader\.py$", "", _READS, over_user=True),
    _save(r"torch/distributed/checkpoint/(filesystem|_fsspec_filesystem|hf_storage)\.py$", r"read\w*|_read\w*|_slice_file|load_bytes", _READS, over_user=True),
    _save(r"torch/distributed/(_shard/)?checkpoint/", r"(?!wrapper$).*", _WRITES, over_user=True),
    _save(_SITE + r"safetensors/", r"load\w*|_?get\w*|deserialize\w*|_view2torch", _READS),
    _save(_SITE + r"safetensors/", "", _WRITES),
    _save(_SITE + r"numpy/lib/(_npyio_impl|npyio|_format_impl|format)\.py$", r"save\w*|_savez|write_array", "writes arrays"),
    _save(_package("orbax/checkpoint torchsnapshot tensorizer zarr tensorstore runai_model_streamer nvidia_resiliency_ext/checkpointing")),
    _save(_package("dlrover/trainer/torch/flash_checkpoint fastpersist")),
    _save(r"(^|/)deepspeed/(runtime/checkpoint_engine|checkpoint|io|nebula)/"),
    _saver(r"(^|/)deepspeed/runtime/(engine|pipe/\w+|zero/\w+)\.py$", r"_?(save|load)_\w*(checkpoint|state|model)\w*|_copy_recovery_script|_save_moe_\w+"),
    _saver(_LIGHTNING + r"plugins/io/"),
    _saver(_LIGHTNING + r"callbacks/(model_checkpoint|on_exception_checkpoint)\.py$", r"_?save\w*|_remove_checkpoint", _WRITES),
    _saver(_LIGHTNING, r"_?(save|load|dump|remove|restore|resume)_?\w*checkpoint\w*|_restore_modules_and_callbacks|_atomic_save"),
    _saver(
        _TREE + r"accelerate/(accelerator|checkpointing|utils/(other|fsdp_utils|modeling))\.py$",
        r"save|save_\w+|load_(state|accelerator_state|checkpoint\w*|fsdp_\w+|state_dict|custom_state)",
    ),
    _saver(
        _TREE + r"transformers/(trainer\w*|modeling_utils|integrations/\w+|core_model_loading)\.py$",
        r"_save\w*|save_(model|pretrained|state)|_load_from_checkpoint|_?rotate_checkpoints|_sorted_checkpoints"
        r"|_load_(optimizer_and_scheduler|best_model|pretrained_model|rng_state|state_dict\w*)",
    ),
    _saver(_TREE + r"(peft|diffusers|trl)/", "save_pretrained|save_model|_?save_checkpoint", _WRITES),
    _saver(r"(^|/)megatron/.*(checkpointing\.py$|dist_checkpointing/)"),
    _saver(r"(^|/)(torchtitan/components/checkpoint|torchtune/training/checkpointing/\w+|composer/(checkpoint/\w+|utils/checkpoint)|nanotron/serialize/\w+)\.py$"),
    _saver(r"(^|/)(fairseq/checkpoint_utils|fairseq2/checkpoint/\w+|ignite/handlers/checkpoint|mmengine/runner/checkpoint|colossalai/checkpoint_io/\w+)\.py$"),
    # -- what lies outside the job
    _outside(_SITE + r"wandb/(?!agents/|integration/|wandb_agent)", does="waits for Weights & Biases"),
    _outside(_package("mlflow comet_ml neptune clearml aim swanlab trackio dvclive"), does="waits for its experiment tracker"),
    _outside(_package("huggingface_hub hf_transfer hf_xet modelscope kagglehub kaggle gdown"), does="transfers files from or to a model hub"),
    _outside(
        _package(
            "botocore boto3 s3transfer aiobotocore s3fs gcsfs adlfs minio cloudpathlib smart_open oss2 tos google/cloud/storage azure/storage azure/core"
            " multistorageclient s3torchconnector pyarrow/fs"
        ),
        does="transfers files from or to object storage",
    ),
    _outside(_package("fsspec"), does="transfers files through fsspec"),
    _outside(_package("requests urllib3 aiohttp httpx2? httpcore2? grpc websockets? paramiko pycurl")),
    _outside(_package("redis psycopg2? pymongo pymysql asyncpg sqlalchemy elasticsearch kafka pika etcd3?"), does="waits for a database or a message queue"),
    _outside(_STDLIB + r"(http/client|urllib/request|ftplib|smtplib|imaplib|socket|ssl|xmlrpc/client)\.py$"),
    _outside(r"(^|/)torch/hub\.py$", r"download_url_to_file|load_state_dict_from_url|_load_\w+|_get_cache_or_reload"),
    _outside(_STDLIB + r"(shutil|tarfile|zipfile(/\w+)?|gzip|lzma|bz2)\.py$", "", "copies, packs or removes files", "storage"),
    _outside(
        _SITE + r"datasets/(arrow_dataset|dataset_dict|arrow_writer|fingerprint)\.py$",
        r"map|_map_single|filter|_?save_to_disk\w*|sort|shuffle|flatten_indices|train_test_split|cast|write\w*|from_generator|push_to_hub|_push_\w+",
        "prepares a dataset", "user_code", over_user=True,
    ),
    _outside(
        _SITE + r"datasets/(load|builder|download/\w+|io/\w+|packaged_modules/.+|utils/(file_utils|py_utils|extract))\.py$", "", "loads or prepares a dataset",
        over_user=True,
    ),
    _outside(
        _SITE + r"(transformers/(tokenization_\w+|convert_slow_tokenizer|models/auto/tokenization_auto)|tokenizers/implementations/\w+|sentencepiece/__init__"
        r"|tiktoken/\w+)\.py$", "", "tokenises text", "user_code",
    ),
    _outside(_SITE + r"(torchvision|torchaudio|torchtext)/datasets/\w*utils\.py$", does="fetches or unpacks a dataset"),
    # -- compilation, where the compile probe does not tell it; CompiledFxGraph.__call__ is the compiled code running
    Known("compiling", r"torch/_dynamo/(convert_frame|symbolic_convert|output_graph)\.py$", "", "compiles", over_user=True),
    Known(
        "compiling",
        r"torch/_inductor/(async_compile|codecache|compile_fx|select_algorithm|autotune_process)\.py$",
        r"(?!__call__$).*",
        "compiles",
        over_user=True,
    ),
    # -- no cause of its own, but worth the words
    Known("noted", r"torch/(profiler/\w+|autograd/profiler)\.py$", r"step|stop\w*|export\w*|__exit__|_transit_action|\w*trace\w*", "writes a profile"),
    Known("noted", FILELOCK, "", "waits for a lock file that another process holds"),
    Known("noted", FILE_BATON, "", "waits for another process to build a C++ extension, or for a lock file that a killed build has left"),
    Known("noted", r"torch/utils/cpp_extension\.py$", "", "builds a C++ extension"),
    Known("noted", r"^<frozen importlib\._bootstrap", "", "imports a module"),
    Known("noted", _STDLIB + r"subprocess\.py$", "", "waits for a child process"),
)  # fmt: skip

_COMPILED = tuple((each, re.compile(each.file), re.compile(each.functions)) for each in TABLE)

EVALUATES = re.compile(
    r"_?(run_|do_)?(evaluate|evaluation|validate|validation|eval|test)(_(loop|epoch|step|model|one_epoch|batch|dataset|all|metrics|dataloop))?"
    r"|(evaluate|validate|eval)_\w+|_run_sanity_check"
)
EVALUATING_LIBRARIES = re.compile(_LIGHTNING + r"(loops/evaluation_loop|trainer/trainer)\.py$|" + _TREE + r"(transformers/trainer\w*\.py$|lm_eval/)")

# the commands whose child process is a transfer, by the name in /proc/PID/stat (at most 15 characters)
TRANSFERS = frozenset((
    "aws", "gsutil", "gcloud", "rsync", "scp", "sftp", "ssh", "curl", "wget", "s5cmd", "s3cmd", "rclone", "azcopy", "hadoop", "hdfs", "git", "git-lfs", "hf",
    "huggingface-cli", "mc", "ossutil", "tar", "cp", "mv", "dvc",
))  # fmt: skip


@lru_cache(maxsize=8192)
def entries(file: str, function: str) -> tuple[Known, ...]:
    """The entries that a frame of this file and this bare function name matches, at most one of a kind."""
    found: dict[Work, Known] = {}
    for known, path, name in _COMPILED:
        if known.kind not in found and path.search(file) and (not known.functions or name.fullmatch(function)):
            found[known.kind] = known
    return tuple(found.values())


def evaluates(function: str) -> bool:
    """Whether a function of this bare name is an evaluation by its name."""
    return EVALUATES.fullmatch(function) is not None
