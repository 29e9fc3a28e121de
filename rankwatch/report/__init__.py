"""Renderings of an incident and of a job: JSON, text, Markdown, HTML. Pure: documents in, text out."""
