"""Documents, masked rows, and the files of tasks: SQuAD, SWAG, labelled texts."""
