"""The table of known work: each entry by a stack as its library shows it, and what must not be taken for it."""

import pytest
from build_jobs import frames

from rankwatch.model import Stack, Thread
from rankwatch.monitor.diagnose import frames as reading
from rankwatch.monitor.diagnose import known_work

STEP = "train.py:52:train_step"
MAIN = "train.py:70:<module>"


def stack(*lines):
    return Stack(1, 0.0, (Thread("MainThread", 1, frames(*lines)),))


def std(file):
    return f"/usr/lib/python3.11/{file}"


def frame_stack(*lines):
    """As `stack`; `!threading.py:...` is a file of the standard library, a line with a leading `/` or `<` is taken as it is."""
    found = []
    for line in lines:
        text = std(line[1:]) if line.startswith("!") else line
        (frame,) = frames(text)
        file, number, name = text.rsplit(":", 2)
        found.append(type(frame)(name, file, int(number)) if text.startswith(("/", "<")) else frame)
    return Stack(1, 0.0, (Thread("MainThread", 1, tuple(found)),))


# innermost first; the first frame is the one whose entry is meant
KNOWN = {
    "debugger": [
        ("!pdb.py:400:Pdb._cmdloop", "!pdb.py:460:Pdb.interaction", "!pdb.py:330:Pdb.user_line", "!bdb.py:90:Bdb.trace_dispatch", STEP),
        ("@ipdb/__main__.py:77:set_trace", STEP),
        ("@remote_pdb/__init__.py:120:RemotePdb.set_trace", STEP),
        ("@pudb/debugger.py:300:Debugger.interaction", STEP),
        ("@debugpy/_vendored/pydevd/pydevd.py:2204:PyDB._do_wait_suspend", "@debugpy/_vendored/pydevd/_pydevd_bundle/pydevd_frame.py:100:trace_dispatch", STEP),
        ("@debugpy/server/api.py:300:wait_for_client", "train.py:5:main"),
        ("@IPython/terminal/embed.py:250:InteractiveShellEmbed.mainloop", STEP),
        ("!code.py:250:InteractiveConsole.interact", STEP),
        ("!pdb.py:400:_cmdloop", "@torch/distributed/__init__.py:140:_DistributedPdb.interaction", STEP),
        ("@torch/distributed/__init__.py:160:breakpoint", STEP),
    ],
    "collective": [
        ("@torch/distributed/distributed_c10d.py:3252:all_reduce", "@torch/distributed/c10d_logger.py:83:wrapper", STEP),
        (
            "@torch/distributed/distributed_c10d.py:3800:all_gather_into_tensor",
            "@torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:200:foreach_all_gather",
            STEP,
        ),
        ("@torch/distributed/distributed_c10d.py:3600:broadcast_object_list", "@accelerate/data_loader.py:860:DataLoaderDispatcher._fetch_batches", STEP),
        ("@torch/distributed/_functional_collectives.py:150:wait_tensor", STEP),
        # saving by a collective: it waits for the others, however the function is called
        ("@torch/distributed/distributed_c10d.py:3700:all_gather", "train.py:18:save_checkpoint", MAIN),
        (
            "@torch/distributed/distributed_c10d.py:3500:gather_object",
            "@torch/distributed/checkpoint/utils.py:120:_DistWrapper.gather_object",
            "@torch/distributed/checkpoint/utils.py:200:_DistWrapper.reduce_scatter",
            "@torch/distributed/checkpoint/state_dict_saver.py:500:_save_state_dict",
            "@torch/distributed/checkpoint/state_dict_saver.py:180:save",
            "train.py:18:save_checkpoint",
        ),
        (
            "@torch/distributed/distributed_c10d.py:5356:barrier",
            "@lightning/pytorch/strategies/ddp.py:310:DDPStrategy.barrier",
            "@lightning/pytorch/trainer/trainer.py:1460:Trainer.save_checkpoint",
            "train.py:33:on_train_batch_end",
        ),
    ],
    "data_loading": [
        (
            "@torch/utils/data/dataloader.py:1310:_MultiProcessingDataLoaderIter._try_get_data",
            "@torch/utils/data/dataloader.py:741:_BaseDataLoaderIter.__next__",
            STEP,
        ),
        (
            "data.py:40:Images.__getitem__",
            "@torch/utils/data/_utils/fetch.py:54:_MapDatasetFetcher.fetch",
            "@torch/utils/data/dataloader.py:741:__next__",
            STEP,
        ),
        ("@torch/serialization.py:1500:load", "data.py:41:Shards.__getitem__", "@torch/utils/data/_utils/fetch.py:54:fetch", STEP),
        (
            "!ssl.py:1200:SSLSocket.read",
            "@urllib3/response.py:700:HTTPResponse.read",
            "@requests/models.py:820:generate",
            "data.py:44:Remote.__getitem__",
            "@torch/utils/data/_utils/fetch.py:54:fetch",
            STEP,
        ),
        ("data.py:40:Mixed.__getitem__", "@torch/utils/data/dataset.py:300:ConcatDataset.__getitem__", STEP),
        ("data.py:50:decode", "@webdataset/pipeline.py:100:DataPipeline.iterator", STEP),
        ("@torchdata/stateful_dataloader/stateful_dataloader.py:448:_StatefulMultiProcessingDataLoaderIter.__next__", STEP),
        ("!time.py:1:x", "@streaming/base/dataset.py:1142:StreamingDataset.prepare_shard", "@streaming/base/dataset.py:1475:StreamingDataset.__iter__", STEP),
        ("@nvidia/dali/plugin/pytorch.py:200:DALIGenericIterator.__next__", STEP),
        ("@grain/_src/python/data_loader.py:195:_DataLoaderIterator.__next__", STEP),
        ("@tensorflow/python/data/ops/iterator_ops.py:800:OwnedIterator._next_internal", STEP),
        ("@tensorflow_datasets/core/dataset_utils.py:60:_eager_dataset_iterator", STEP),
        (
            "data.py:60:tokenize",
            "@datasets/iterable_dataset.py:332:MappedExamplesIterable.__iter__",
            "@datasets/iterable_dataset.py:2200:IterableDataset.__iter__",
            STEP,
        ),
        ("/ws/Megatron-LM/megatron/core/datasets/gpt_dataset.py:200:GPTDataset.__getitem__", "pretrain_gpt.py:90:forward_step"),
        ("data.py:40:Stream.__iter__", "@accelerate/data_loader.py:577:DataLoaderShard.__iter__", STEP),
        ("data.py:40:Stream.__iter__", "@lightning/pytorch/loops/fetchers.py:121:_PrefetchDataFetcher.__next__", MAIN),
        ("data.py:40:Stream.__next__", "@transformers/trainer.py:2289:Trainer.get_batch_samples", MAIN),
        ("data.py:40:Stream.__next__", "@deepspeed/runtime/dataloader.py:130:DeepSpeedDataLoader.__next__", STEP),
        ("@ffcv/loader/epoch_iterator.py:100:EpochIterator.__next__", STEP),
        # a loader below an evaluation or a checkpoint's path is still a loader
        (
            "@torch/utils/data/dataloader.py:1310:_try_get_data",
            "@lightning/pytorch/loops/fetchers.py:121:__next__",
            "@lightning/pytorch/loops/evaluation_loop.py:146:_EvaluationLoop.run",
            MAIN,
        ),
    ],
    "checkpointing": [
        ("@torch/serialization.py:1220:_save", "@torch/serialization.py:960:save", "train.py:30:save_checkpoint"),
        ("train.py:20:write", "@torch/serialization.py:1220:_save", "@torch/serialization.py:960:save", "train.py:30:finish"),
        ("@torch/serialization.py:2100:_load", "@torch/serialization.py:1520:load", "train.py:10:resume"),
        ("@torch/jit/_serialization.py:90:save", "train.py:30:export"),
        (
            "@torch/distributed/checkpoint/filesystem.py:400:_write_files_from_queue",
            "@torch/distributed/checkpoint/filesystem.py:690:write_data",
            "train.py:30:save",
        ),
        (
            "@torch/distributed/checkpoint/filesystem.py:800:FileSystemReader.read_data",
            "@torch/distributed/checkpoint/state_dict_loader.py:200:read_data",
            "train.py:9:resume",
        ),
        ("@torch/distributed/checkpoint/state_dict_loader.py:200:_load_state_dict", "train.py:9:resume"),
        (
            "!concurrent/futures/_base.py:450:Future.result",
            "@torch/distributed/checkpoint/_async_process_executor.py:200:_ProcessBasedAsyncCheckpointExecutor.execute_save",
            "@torch/distributed/checkpoint/state_dict_saver.py:300:async_save",
            "train.py:30:save",
        ),
        ("@safetensors/torch.py:353:save_file", "train.py:30:save"),
        ("@safetensors/torch.py:383:load_file", "train.py:30:resume"),
        ("@numpy/lib/_npyio_impl.py:580:save", "train.py:30:dump_embeddings"),
        ("@orbax/checkpoint/_src/checkpointers/checkpointer.py:221:Checkpointer.save", "train.py:30:save"),
        ("@dlrover/trainer/torch/flash_checkpoint/engine.py:300:CheckpointEngine.save_to_memory", "train.py:30:save"),
        (
            "@torch/serialization.py:960:save",
            "@deepspeed/runtime/checkpoint_engine/torch_checkpoint_engine.py:25:save",
            "@deepspeed/runtime/engine.py:4869:DeepSpeedEngine.save_checkpoint",
            "train.py:30:save",
        ),
        ("@deepspeed/runtime/checkpoint_engine/fast_checkpoint_engine.py:25:save", "train.py:30:save"),
        ("!shutil.py:250:copyfileobj", "@deepspeed/runtime/engine.py:5000:DeepSpeedEngine._copy_recovery_script", "train.py:30:save"),
        (
            "@lightning/fabric/plugins/io/torch_io.py:37:TorchCheckpointIO.save_checkpoint",
            "@lightning/pytorch/callbacks/model_checkpoint.py:593:_save_checkpoint",
            MAIN,
        ),
        ("!shutil.py:750:rmtree", "@lightning/pytorch/callbacks/model_checkpoint.py:900:ModelCheckpoint._remove_checkpoint", MAIN),
        ("model.py:90:on_save_checkpoint", "@lightning/pytorch/trainer/connectors/checkpoint_connector.py:400:_CheckpointConnector.dump_checkpoint", MAIN),
        ("@accelerate/checkpointing.py:100:save_accelerator_state", "@accelerate/accelerator.py:3625:Accelerator.save_state", "train.py:30:save"),
        ("@transformers/trainer.py:3363:Trainer._save_checkpoint", "@transformers/trainer.py:2700:_maybe_log_save_evaluate", MAIN),
        ("!shutil.py:750:rmtree", "@transformers/trainer_utils.py:300:rotate_checkpoints", MAIN),
        ("@peft/peft_model.py:300:PeftModel.save_pretrained", MAIN),
        (
            "/ws/Megatron-LM/megatron/training/checkpointing.py:500:save_checkpoint",
            "/ws/Megatron-LM/megatron/training/training.py:1500:train",
            "pretrain_gpt.py:90:<module>",
        ),
        ("/ws/torchtitan/torchtitan/components/checkpoint.py:400:CheckpointManager.save", "/ws/torchtitan/torchtitan/train.py:500:Trainer.train"),
        ("/ws/fairseq/fairseq/checkpoint_utils.py:200:torch_persistent_save", "train.py:30:save"),
    ],
    "external_io": [
        (
            "!threading.py:327:Condition.wait",
            "@wandb/sdk/mailbox/mailbox_handle.py:122:MailboxHandle.wait_or",
            "@wandb/sdk/wandb_init.py:900:_WandbInit.init",
            "train.py:8:main",
        ),
        (
            "!socket.py:706:SocketIO.readinto",
            "@urllib3/connection.py:500:getresponse",
            "@requests/sessions.py:700:Session.send",
            "@mlflow/utils/rest_utils.py:103:http_request",
            STEP,
        ),
        (
            "!ssl.py:1200:read",
            "@httpx/_client.py:900:Client.send",
            "@huggingface_hub/file_download.py:334:http_get",
            "@huggingface_hub/file_download.py:808:hf_hub_download",
            "train.py:8:main",
        ),
        ("@botocore/httpsession.py:465:URLLib3Session.send", "@s3transfer/upload.py:700:_main", "train.py:30:upload"),
        ("!threading.py:327:Condition.wait", "@fsspec/asyn.py:95:sync", "train.py:30:upload"),
        ("!time.py:1:x", "@urllib3/util/retry.py:300:Retry.sleep", "@requests/sessions.py:700:send", "train.py:30:report_metrics"),
        ("@psycopg/connection.py:100:Connection.wait", "train.py:30:next_job"),
        ("!http/client.py:280:HTTPResponse.begin", "!urllib/request.py:1350:do_open", "train.py:30:notify"),
        ("@torch/hub.py:760:download_url_to_file", "train.py:8:main"),
        ("!shutil.py:250:copyfileobj", "train.py:30:stage_data_to_local_disk"),
        ("prep.py:12:clean", "@datasets/arrow_dataset.py:3672:Dataset._map_single", "@datasets/arrow_dataset.py:3217:Dataset.map", "train.py:8:main"),
        ("@datasets/builder.py:900:DatasetBuilder.download_and_prepare", "@datasets/load.py:1423:load_dataset", "train.py:8:main"),
        ("@transformers/tokenization_utils_tokenizers.py:980:_encode_plus", "train.py:8:main"),
        ("@torchvision/datasets/utils.py:60:_urlretrieve", "train.py:8:main"),
        # an upload that a framework's save method makes
        (
            "!ssl.py:1200:read",
            "@huggingface_hub/hf_api.py:5000:HfApi.upload_folder",
            "@transformers/modeling_utils.py:3319:PreTrainedModel.save_pretrained",
            MAIN,
        ),
        # the job's own function under map reads a file
        ("@torch/serialization.py:1500:load", "prep.py:12:embed", "@datasets/arrow_dataset.py:3672:_map_single", "train.py:8:main"),
    ],
    "compiling": [
        ("@torch/_dynamo/symbolic_convert.py:1300:InstructionTranslator.step", "@torch/_dynamo/convert_frame.py:700:compile_inner", STEP),
        ("@torch/_inductor/async_compile.py:400:AsyncCompile.wait", "@torch/_inductor/codecache.py:3000:load", STEP),
    ],
    "noted": [
        ("@torch/profiler/profiler.py:800:profile.step", STEP),
        ("@torch/utils/file_baton.py:50:FileBaton.wait", "@torch/utils/cpp_extension.py:2400:_jit_compile", STEP),
        ("@torch/utils/cpp_extension.py:2400:_jit_compile", STEP),
        ("@filelock/_api.py:300:BaseFileLock.acquire", STEP),
        ("<frozen importlib._bootstrap_external>:900:exec_module", STEP),
        ("!subprocess.py:2000:Popen._wait", "!subprocess.py:550:run", STEP),
    ],
}
CASES = [pytest.param(kind, lines, id=f"{kind}: {lines[0].split(':')[0]} {number}") for kind, stacks in KNOWN.items() for number, lines in enumerate(stacks)]


@pytest.mark.parametrize(("kind", "lines"), CASES)
def test_known_work_is_recognised(kind, lines):
    seen = reading.recognise(frame_stack(*lines))
    assert seen is not None
    assert seen.kind == kind


def test_every_entry_of_the_table_has_a_stack():
    shown = {
        each
        for stacks in KNOWN.values()
        for lines in stacks
        for frame in frame_stack(*lines).main
        for each in known_work.entries(frame.file, reading.function(frame))
    }
    assert [each.file for each in known_work.TABLE if each not in shown] == []


NOTHING = {
    "a sweep's agent that runs the job": ("train.py:52:train_step", "@wandb/agents/pyagent.py:300:Agent._run_job", "@wandb/wandb_agent.py:10:agent", MAIN),
    "a tracker's wrapper around the training function": ("train.py:52:train_step", "@mlflow/tracing/fluent.py:100:wrapper", MAIN),
    "a script under debugpy that runs": (
        "train.py:52:train_step",
        "@debugpy/_vendored/pydevd/pydevd.py:3500:PyDB._exec",
        "@debugpy/server/cli.py:280:run_file",
    ),
    "a script under python -m pdb that runs": ("train.py:52:train_step", "!bdb.py:600:Bdb.run", "!pdb.py:1600:Pdb._run", "!pdb.py:1700:main"),
    "a progress bar around the loop": ("train.py:52:train_step", "@tqdm/std.py:1180:tqdm.__iter__", MAIN),
    "a retry around a function of the job": ("train.py:52:train_step", "@tenacity/__init__.py:400:Retrying.__call__", MAIN),
    "a job's own folder named like a library": ("/home/me/wandb/requests/aim/train.py:52:train_step",),
    "a job's own module named datasets/load.py": ("/home/me/datasets/load.py:52:map", "/home/me/train.py:3:main"),
    "a function of the job named like a save": ("train.py:18:save_checkpoint", MAIN),
    "a compiled graph that runs": ("@torch/_inductor/codecache.py:1500:CompiledFxGraph.__call__", STEP),
    "process groups in the making": ("@torch/distributed/distributed_c10d.py:5800:new_group", "train.py:10:main"),
    "a spawn wrapper": ("train.py:52:train_step", "@torch/multiprocessing/spawn.py:90:_wrap", "!multiprocessing/process.py:108:BaseProcess.run"),
    "a context manager of accelerate": ("train.py:52:prepare", "@accelerate/state.py:416:PartialState._goes_first", MAIN),
    "a trainer's frames around a training step": (
        "model.py:20:training_step",
        "@lightning/pytorch/strategies/strategy.py:391:Strategy.training_step",
        "@lightning/pytorch/loops/fit_loop.py:200:_FitLoop.run",
        MAIN,
    ),
    "an engine's frames around a forward": ("model.py:20:forward", "@deepspeed/runtime/engine.py:2000:DeepSpeedEngine.forward", MAIN),
}


@pytest.mark.parametrize("lines", NOTHING.values(), ids=NOTHING)
def test_what_only_surrounds_the_jobs_code_says_nothing(lines):
    assert reading.recognise(frame_stack(*lines)) is None


@pytest.mark.parametrize(
    ("lines", "does"),
    [
        (("@torch/serialization.py:1220:_save", "train.py:30:f"), "writes a checkpoint"),
        (("@torch/serialization.py:1520:load", "train.py:30:f"), "reads a checkpoint"),
        (("@safetensors/torch.py:383:load_file", "train.py:30:f"), "reads a checkpoint"),
        (("@wandb/sdk/wandb_run.py:2000:Run.finish", "train.py:30:f"), "waits for Weights & Biases"),
        (("@datasets/arrow_dataset.py:3672:_map_single", "train.py:30:f"), "prepares a dataset"),
        (
            ("@httpcore/_backends/sync.py:128:read", "@huggingface_hub/file_download.py:808:hf_hub_download", "train.py:30:f"),
            "transfers files from or to a model hub",
        ),
        (("@urllib3/response.py:700:read", "data.py:3:clean", "@datasets/arrow_dataset.py:3217:map", "train.py:30:f"), "waits for a transfer over the network"),
    ],
)
def test_the_words_say_what_is_done(lines, does):
    assert reading.recognise(frame_stack(*lines)).does == does


@pytest.mark.parametrize(
    ("lines", "frame"),
    [
        (("train.py:90:forward", "train.py:80:evaluate", MAIN), "train.py:80:evaluate"),
        (("model.py:90:forward", "train.py:80:validation_step", MAIN), "train.py:80:validation_step"),
        (("model.py:90:forward", "@transformers/trainer.py:2904:Trainer.evaluation_loop", MAIN), "trainer.py:2904:Trainer.evaluation_loop"),
        (
            ("model.py:90:forward", "@lightning/pytorch/loops/evaluation_loop.py:146:_EvaluationLoop._evaluation_step", MAIN),
            "evaluation_loop.py:146:_EvaluationLoop._evaluation_step",
        ),
        (("@torch/nn/modules/module.py:2900:Module.eval", "train.py:80:main"), None),
        (("train.py:90:forward", "train.py:80:train_step", MAIN), None),
        (("@numexpr/necompiler.py:900:evaluate", "train.py:80:train_step", MAIN), None),
    ],
)
def test_an_evaluation_is_known_by_its_functions(lines, frame):
    seen = reading.evaluation(frame_stack(*lines).main)
    assert (seen.short if seen else None) == frame
