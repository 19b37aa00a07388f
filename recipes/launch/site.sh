# shellcheck shell=bash disable=SC2034
# Settings of your site. Edit them here, or export the variables; every launcher reads this file.

# A checkout of Megatron-LM core_v0.16.1, or with Python 3.12 of core_v0.19.0, at the same path on all nodes.
: "${MEGATRON_LM_PATH:=../Megatron-LM}"

# Training data: a file of JSON Lines or a quoted glob, at the same path on all nodes. Empty: the rollouts shipped with
# this repository, and a tokenizer for them, for a trial run.
: "${DATA:=}"
# The tokenizer of chat messages: the folder of the model's tokenizer. Empty: the lines hold tokens.
: "${TOKENIZER:=}"
# yes: one sample per assistant turn of a chat, with its full history as prefix.
: "${EXPAND_TURNS:=yes}"

# Checkpoints, in a folder that all nodes share. A restarted job continues from the last one. Empty: runs/RECIPE.
: "${SAVE:=}"
: "${SAVE_INTERVAL:=50}"
# A Megatron checkpoint to start from. Empty: random weights.
: "${WEIGHTS:=}"

: "${GPUS_PER_NODE:=8}"
# How often torchrun restarts the workers after one of them dies.
: "${MAX_RESTARTS:=1}"
