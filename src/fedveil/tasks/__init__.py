"""What is learned: data sets and their files, splits, partitions over clients, models, and the `Task` that joins them.

Importing this package imports nothing else, so that the names of data sets and models can be listed without torch.
The public pieces are in `fedveil.tasks.task`.
"""
