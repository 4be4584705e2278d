"""What is believed about a request before it is served: answer length, quality, cost.

A predictor is trained by `simcluster predictors train` and kept in one JSON file, schema version 1:

    format, schema_version   "simcluster predictor", 1
    origin                   source and licence of the table, prompts and rows that were trained on
    tokens                   what cuts prompts into tokens: "estimate-1", or "sha256:" and the hash of a tokenizer.json
    start                    "nothing", or "task_means": the heads correct the means of the request's task
    features                 names of the features, in the order of the heads' columns; `task` with "task_means" alone
    models                   name, parameters_b [billions], max_model_len [tokens]; the position is the feature `model`
    split                    seed and shares of the prompts that are held out, and that decide when to stop
    baselines                means of the training rows by model, over all (task null) and by task
    pca                      components: 512 rows of 16 whole numbers of millionths; offset: of the mean prompt
    heads.accuracy, .length  trees (LightGBM's text, line by line), best_iteration (their number), sha256 of the text

The features of a prompt are 16 principal components of its signed token hashes per token, counts of tokens, characters
and sentences, characters per token, and what its wording shows: limits of length, kinds of tasks, notation. Those of a
model are its number (a category), the logarithm of its parameters and its longest context. Heads that correct task
means also see the task's number by name (a category), since a text means other things in other tasks; files without
this feature are read too. Source: paper B.4.

Hashing and projection are whole-number arithmetic and training is single-threaded with fixed seeds: equal tables give
equal files, and a file predicts the same everywhere. A file that is missing, damaged or of another version is an error.
"""
