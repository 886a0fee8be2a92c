"""Opens rows with images, which TRL tokenizes and collates during training, with the model's processor."""

from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Image, IterableDataset, List, Value

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import DataError, LoadError, summarize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from hf_fsdp_recipes.training.arguments import Arguments
    from hf_fsdp_recipes.training.data.dataset_parts import DatasetPart

COLUMNS = ("image", "images")


def has_images(rows: Dataset | IterableDataset) -> bool:
    """Return whether rows have images: at least one value in an image column or, for a stream, an image column."""
    names = [name for name in COLUMNS if name in (rows.column_names or [])]
    return any(not isinstance(rows, Dataset) or pc.sum(_count_images(rows, name)).as_py() for name in names)


def _count_images(rows: Dataset, column: str) -> pa.ChunkedArray:
    """Return the number of images in each row."""
    values = rows.select_columns([column]).flatten_indices().data.column(column)
    is_list = isinstance(rows.features[column], List)
    return pc.fill_null(pc.list_value_length(values), 0) if is_list else pc.is_valid(values).cast("int32")


def open_images(part: "DatasetPart", text_column: str) -> "DatasetPart":
    """Return a dataset with its image paths cast to images. Every row must have an image."""
    columns = set(part.train.column_names)
    if not {"messages", text_column} & columns and not {"prompt", "completion"} <= columns:
        raise DataError(
            f"{part.name} has columns {sorted(columns)}. Rows with images need messages, prompt + completion, or {text_column}."
        )
    evaluation = part.evaluation and _with_images(part.evaluation, part.name)
    return replace(part, train=_with_images(part.train, part.name), evaluation=evaluation)


def _with_images(rows: Dataset, name: str) -> Dataset:
    column = next((column for column in COLUMNS if column in rows.column_names), None)
    if column is None:
        raise DataError(f"the evaluation rows of {name} have no images. Evaluate on rows like the training rows.")
    feature, num_images = rows.features[column], _count_images(rows, column)
    if pc.min(num_images).as_py() < 1:
        # A rank whose batch has no images would skip the all-gathers of the vision tower, and the other ranks would wait in them.
        row = num_images.index(0).as_py()
        raise DataError(
            f"{name}, row {row + 1}: {column} is empty. Every row needs an image; train on rows without one separately."
        )
    if feature == Value("string"):
        return rows.cast_column(column, Image())
    return rows.cast_column(column, List(Image())) if feature == List(Value("string")) else rows


def load_processor(arguments: "Arguments", tokenizer: "PreTrainedTokenizerBase") -> "ProcessorMixin":
    """Load the model's processor and give it the run's tokenizer; raise a LoadError if the model has none. Collective."""
    from transformers import AutoProcessor, ProcessorMixin

    model, code = arguments.model, arguments.training.trust_remote_code
    name = model.model_name_or_path

    def read() -> object:
        try:
            return AutoProcessor.from_pretrained(name, revision=model.model_revision, trust_remote_code=code)
        except (ImportError, OSError, ValueError) as error:
            raise LoadError(f"the processor of {name} cannot be loaded: {summarize(error)}.") from error

    processor = distributed.main_first(read)
    if not isinstance(processor, ProcessorMixin):
        raise LoadError(
            f"the rows have images, but {name} has no processor for them. Use an image-text model, or remove the image column."
        )
    processor.tokenizer = tokenizer
    processor.chat_template = tokenizer.chat_template or processor.chat_template
    distributed.print_main(
        "rows with images: tokenized while training, and neither packed, filtered nor counted beforehand"
    )
    return processor
