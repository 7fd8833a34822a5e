"""The embedded engine over HTTP, in SGLang's protocol: for any client of SGLang, and for sglang-router."""
