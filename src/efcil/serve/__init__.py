"""A model behind a page and a JSON interface: ask it, see what it knows, teach it new classes (`efcil serve`).

Nothing here is imported by `import efcil`. Starlette and uvicorn come with the extra `serve`.
"""
