"""Folded training inside Megatron-LM's own ``pretrain``, through the seams that it offers.

A site's own ``pretrain_*.py`` takes three lines: the import, its providers and the arguments. With core_v0.16::

    from mcore_prefix_tree.mcore.megatron_lm.providers import add_prefix_tree_args, prefix_tree_providers

    datasets, model, step = prefix_tree_providers(train_valid_test_datasets_provider, model_provider, forward_step)
    pretrain(datasets, model, ModelType.encoder_or_decoder, step, extra_args_provider=add_prefix_tree_args)

and with core_v0.19, whose scripts parse the arguments themselves, the second and third line are::

    args = parse_and_validate_args(extra_args_provider=add_prefix_tree_args, ...)
    container = pretrain_cfg_container_from_args(args, None if args.prefix_tree else gpt_config_from_args(args))
    datasets, model, step = prefix_tree_providers(train_valid_test_datasets_provider, None, forward_step)
    pretrain(container, datasets, ModelType.encoder_or_decoder, step, model_provider=model)

``add_prefix_tree_args`` checks the job when its command line is parsed, and ends a dry run there; a script that gives
Megatron-LM ``args_defaults`` also passes them to it, with ``functools.partial``. An ``extra_args_provider`` that adds
its own arguments returns the parser that it returns. Without ``--prefix-tree`` the script's own three run.

With a pattern of layers (``--hybrid-layer-pattern``) the model is a ``HybridModel``, and ``hybrid_config_from_args``
takes the place of ``gpt_config_from_args``.

``python -m mcore_prefix_tree.pretrain_gpt``, or ``pretrain_hybrid``, is the entry for those without their own script.
Modules of this package that import ``megatron.training`` need Megatron-LM on the path.
"""
