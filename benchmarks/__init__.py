"""How fast cp_attn is; README.md says what each figure means. One module answers one question."""
