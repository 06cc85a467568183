"""The commands of `smallvit`: each calls the library and prints. Heavy modules are imported when one runs."""
