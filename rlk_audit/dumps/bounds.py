"""What a reader accepts at most: a dump beyond a bound is refused with a sentence instead of filling the memory."""

MAX_FILE_BYTES = 32 * 2**30
"""Size of a file that is read whole: ``.pt``, ``.pkl``, npz and safetensors."""
MAX_DECODED_BYTES = 4 * 2**30
"""Bytes that the arrays of one npz file may decompress to."""
MAX_PICKLE_BYTES = 512 * 2**20
"""Size of the pickle inside a ``.pt`` file, which holds everything but the tensors' values."""
MAX_LINE_BYTES = 128 * 2**20
"""Length of a line of JSONL, which is one sample."""
MAX_NESTING = 32
"""Depth of lists and objects in a line of JSONL."""
MAX_SAMPLE_TOKENS = 2**24
"""Response tokens of one sample."""
MAX_ROW_GROUP_VALUES = 2**28
"""Values of one column in a row group of Parquet."""
MAX_FOOTER_BYTES = 64 * 2**20
"""Size of the footer of a Parquet file, its table of contents."""
BATCH_VALUES = 2**20
"""Values of one column that are decoded from Parquet at a time, unless one sample has more."""
HEAD_BYTES = 2**20
"""Bytes of a file that are looked at to recognise it where its format has no table of contents."""
TOLD_PER_KIND = 5
"""Samples of which one fault is told by itself; more of the kind are counted."""
MAX_KINDS = 20
"""Kinds of faults that are told of one file; more are counted together."""
