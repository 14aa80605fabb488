"""The border between people's text and the model's token ids: text in, ids out, text out.

`prompts` encodes prompts and conversations, `control` keeps text that spells control tokens text,
`answers` turns ids into text and finds stop strings, `streams` reads and writes encoded text."""
