"""Names of bitsandbytes that are not in its documentation, and why each is needed."""

from bitsandbytes.functional import prefetch_tensor  # moves paged memory to the device
