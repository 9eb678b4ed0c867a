"""`kvfold demo`: a small DeepSeek-V4 model whose compressors are a real worker's, compared with the untouched model.

`model` makes the model, the manifest and the weights file; `process` starts the worker; `folding` puts the worker's
entries where transformers' compressors would put theirs; `trace` generates and compares; `proof` is the whole run, and
`report` what is printed of it.
"""

from kvfold_service.demo.command import run

__all__ = ["run"]
