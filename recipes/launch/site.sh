# shellcheck shell=bash disable=SC2034
# What differs from site to site. Edit it here, or export the variables; every launcher reads this file.

# A checkout of Megatron-LM core_v0.16.1, or with Python 3.12 of core_v0.19.0, in one place on all nodes.
: "${MEGATRON_LM_PATH:=../Megatron-LM}"

# What to train on: a file of JSON Lines or a quoted glob, in one place on all nodes. Empty: the rollouts that ship with
# this repository, and a tokenizer for them, to try things out.
: "${DATA:=}"
# The tokenizer of chat messages: the folder of the model's own. Empty: the lines hold tokens.
: "${TOKENIZER:=}"
# yes: one sample per assistant turn of a chat, with its whole history as prefix.
: "${EXPAND_TURNS:=yes}"

# Checkpoints, in a folder that all nodes share. A job that starts again goes on from the last one. Empty: runs/RECIPE.
: "${SAVE:=}"
: "${SAVE_INTERVAL:=50}"
# A checkpoint of Megatron's to start from. Empty: random weights.
: "${WEIGHTS:=}"

: "${GPUS_PER_NODE:=8}"
# How often torchrun starts the workers again when one of them died.
: "${MAX_RESTARTS:=1}"
