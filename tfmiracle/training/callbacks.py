"""Coding a model during `fit`."""

import inspect
import os

import keras

from tfmiracle.training.coding_loop import CodingLoop


class CompressionCallback(keras.callbacks.Callback):
    """Codes a model during `fit` and writes its `.miracle` file (Havasi et al. 2019).

    After `train_steps` steps of plain training the coding scales are fixed; then
    rounds alternate with fine-tuning: a round codes the next `blocks_per_round` blocks
    and fixes them to what the decoder will produce, `finetune_steps` steps adapt the
    blocks that are left. When the last block is coded, training stops; the file is
    made of the model as it then is, decoded and compared, and written. If `fit` ends
    before (epochs used up, early stopping), the remaining blocks are coded at once,
    without fine-tuning; a run that is interrupted writes nothing, and goes on from the
    blocks already coded in the next `fit`.

    Give `fit` enough epochs: `steps_needed(model)` steps. Callbacks that change weights
    when training ends (EarlyStopping that restores them) must come before this one.

    Args:
      filepath: the file to write; or a `CodingLoop`, which says all.
      blocks_per_round: number of blocks coded between two stretches of fine-tuning.
      finetune_steps: number of steps between two rounds (100 in the paper, for rounds
        of one block). With `steps_per_execution`, the next multiple of it.
      train_steps: number of steps before the first round.
      overwrite: whether existing files may be replaced.
      recalibration_data: batches of inputs, from which the statistics of
        BatchNormalization are taken anew when all is coded; see `recalibrate`.
      posterior_path: where to write a `CodedPosterior`, Q of all weights as they were
        coded, which diagnostics and pruning need; by default nowhere.
      metadata: entries for the file's metadata; anything JSON can say, up to 1 MiB.
      architecture: whether the file says how the network is built. Without it the file
        is smaller, and whoever loads it needs the network: `load(path, model=network)`.
      record_path: where to write, as JSON, how the file was made: version of tfmiracle,
        parameterization, budget, coder, and `record`; by default nowhere.
      record: further entries of that.
      verbose: 0 for silence, 1 for progress over blocks where `fit` itself shows none
        (`verbose=0`): a bar on a terminal and in a notebook, a few lines elsewhere.

    Attributes:
      loop: the `CodingLoop`, which this drives.
      history: one dict a round, see `CodingLoop`.
      file: the `MiracleFile` written, or None.
      file_bytes: its size.
    """

    __signature__ = inspect.signature(CodingLoop)

    def __init__(self, filepath: str | os.PathLike | CodingLoop, *args, **kwargs):
        super().__init__()
        if not isinstance(filepath, CodingLoop):
            filepath = CodingLoop(filepath, *args, **kwargs)
        self.loop = filepath

    @property
    def filepath(self):
        return self.loop.filepath

    @property
    def history(self):
        return self.loop.history

    @property
    def file(self):
        return self.loop.file

    @property
    def file_bytes(self):
        return self.loop.file_bytes

    def steps_needed(self, model: keras.Model) -> int:
        """Number of training steps until all blocks of `model` are coded."""
        return self.loop.steps_needed(model)

    def on_train_begin(self, logs=None):
        self.loop.start(self.model, quiet=bool((self.params or {}).get("verbose")))
        self._steps_before_epoch = self.loop.step
        self._stop_if_done()

    def on_train_batch_end(self, batch, logs=None):
        self.loop.advance(self._steps_before_epoch + batch + 1, logs)
        self._stop_if_done()

    def on_epoch_end(self, epoch, logs=None):
        self._steps_before_epoch = self.loop.step
        if logs is not None:
            logs["coded_blocks"] = self.loop.coded_blocks

    def on_train_end(self, logs=None):
        self.loop.finish(logs)

    def _stop_if_done(self):
        if self.loop.is_done:
            self.model.stop_training = True
