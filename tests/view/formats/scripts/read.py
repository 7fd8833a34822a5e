"""Reads exports with the packages that own their formats, and prints what they found as JSON."""

import base64
import json
import sys
from pathlib import Path


def lines_of(path):
    """The lines of a file; the text in them may have ends of lines of other kinds."""
    return Path(path).read_text().rstrip("\n").split("\n")


def atif(path):
    """Both public implementations of the models: of 1.8, and NVIDIA's of 1.7, derived from Harbor's own."""
    from atif import Trajectory
    from nat.atif import Trajectory as NatTrajectory

    found = []
    for line in lines_of(path):
        read = Trajectory.model_validate_json(line)
        older = line.replace('"ATIF-v1.8"', '"ATIF-v1.7"')
        assert NatTrajectory.model_validate_json(older).steps
        found.append(
            {
                "id": read.trajectory_id,
                "steps": [step.source for step in read.steps],
                "ids": [step.metrics.completion_token_ids for step in read.steps if step.metrics],
                "subagents": [inner.trajectory_id for inner in read.subagent_trajectories or []],
            }
        )
    return found


def inspect(folder):
    """inspect_ai's own reader: the header, the list of samples, and each sample."""
    from inspect_ai.log import list_eval_logs, read_eval_log, read_eval_log_sample_summaries

    found = []
    for info in sorted(list_eval_logs(str(folder)), key=lambda info: info.name):
        log = read_eval_log(info, resolve_attachments=True)
        assert read_eval_log(info, header_only=True).eval == log.eval
        summaries = read_eval_log_sample_summaries(info)
        assert {(s.id, s.epoch) for s in summaries} == {(s.id, s.epoch) for s in log.samples}
        found.append(
            {
                "task": log.eval.task,
                "status": log.status,
                "means": {score.name: score.metrics["mean"].value for score in log.results.scores},
                "samples": [sample_of(sample) for sample in log.samples],
            }
        )
    return found


def sample_of(sample):
    calls = [call for m in sample.messages if m.role == "assistant" for call in m.tool_calls or []]
    return {
        "id": sample.id,
        "epoch": sample.epoch,
        "roles": [message.role for message in sample.messages],
        "calls": [[call.function, call.arguments] for call in calls],
        "results": [[m.tool_call_id, m.text] for m in sample.messages if m.role == "tool"],
        "scores": {name: score.value for name, score in sample.scores.items()},
        "usage": [[u.input_tokens, u.output_tokens] for u in sample.model_usage.values()],
        "error": sample.error.message if sample.error else None,
        "limit": sample.limit.type if sample.limit else None,
        "answer": sample.output.completion if sample.output.choices else None,
    }


def otel(path):
    """The protobuf of OTLP, and the attributes that OpenTelemetry's registry knows."""
    from google.protobuf.json_format import ParseDict
    from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
    from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes

    modules = (error_attributes, gen_ai_attributes)
    known = {value for module in modules for name, value in vars(module).items() if name.isupper()}
    found = []
    for line in lines_of(path):
        traces = ParseDict(with_bytes(json.loads(line)), TracesData())
        (resource,) = traces.resource_spans
        (scope,) = resource.scope_spans
        for span in scope.spans:
            values = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
            unknown = {name for name in values if not name.startswith("agentrl.")} - known
            assert not unknown, unknown
            assert span.start_time_unix_nano <= span.end_time_unix_nano
            # A malformed call has the text that the model wrote.
            calls = () if "error.type" in values else ("gen_ai.tool.call.arguments",)
            for name in {"gen_ai.input.messages", "gen_ai.output.messages", *calls} & values.keys():
                values[name] = json.loads(values[name])
            found.append(
                {
                    "name": span.name,
                    "trace": span.trace_id.hex(),
                    "id": span.span_id.hex(),
                    "parent": span.parent_span_id.hex(),
                    "values": {
                        k: v for k, v in values.items() if isinstance(v, str | int | float | list | dict)
                    },
                    "events": [event.name for event in span.events],
                    "error": span.status.message,
                }
            )
    return found


def with_bytes(value):
    """The JSON of OTLP has ids in hex, that of protobuf in base64."""
    if isinstance(value, dict):
        ids = {"traceId", "spanId", "parentSpanId"}
        return {
            key: base64.b64encode(bytes.fromhex(inner)).decode() if key in ids else with_bytes(inner)
            for key, inner in value.items()
        }
    return [with_bytes(inner) for inner in value] if isinstance(value, list) else value


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
