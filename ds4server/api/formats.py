"""What a request says about the form of the visible text: ``response_format`` and its spellings on other surfaces."""

from .chat_messages import kind
from .errors import bad_request


def check_choice(form, choice, path):
    """ApiError 400 where a form of the text is asked for beside a call instead of text. path: of the form."""
    if form is not None and choice.mode == "required":
        raise bad_request(f"{path} cannot be combined with a tool_choice that forces a call", path)


def response_format(value, path, nested=True):
    """None for free text, "json_object", or the JSON schema (a dict). ApiError 400 naming the field.

    nested: whether the schema stands inside ``json_schema`` (Chat, Completions) or beside ``type`` (Responses, Messages).
    """
    if value is None:
        return None
    if not isinstance(value, dict):
        raise bad_request(f"{path} must be an object, got {kind(value)}", path)
    what = value.get("type")
    if what == "text":
        return None
    if what == "json_object":
        return "json_object"
    if what != "json_schema":
        raise bad_request(f"{path}.type must be text, json_object or json_schema, got {what!r}", f"{path}.type")
    holder, at = (value.get("json_schema"), f"{path}.json_schema") if nested else (value, path)
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, dict):
        raise bad_request(f"{at}.schema must be an object, got {kind(schema)}", f"{at}.schema")
    return schema
