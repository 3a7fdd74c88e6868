"""`Guard` in the training loops of other libraries: thin callbacks for Lightning, Hugging Face and skorch.

Each attaches a `Guard` to the library's optimizer when training begins and removes it when training ends. A training
call is a round: the model that it starts with is the one that the server sent.
"""
