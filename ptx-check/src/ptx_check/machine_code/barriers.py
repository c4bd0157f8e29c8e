"""mbarriers in shared memory, and bulk copies (TMA) that arrive at them."""

MEANINGS: dict = {}
CONTROL: dict = {}
