{{/* The links of the design's picture and no other: books go to Redis, groups from rollout to reward to buffer, batches
from buffer to learner, weights from learner to rollout; each is opened by the role that stands first. */}}
{{- define "slipstream.links" -}}
rollout: {reward: [9401], learner: [9402], rollout: []} # generators hand weights on, each on a port of its choice
reward: {buffer: [9401]}
learner: {buffer: [9401], learner: []} # ranks also talk on ports that the collectives' library chooses
buffer: {}
audit: {}
{{- end }}

{{- define "slipstream.peer" -}}
podSelector:
  matchLabels: {{- include "slipstream.selector" . | nindent 4 }}
{{- end }}

{{/* Who may come in: (list root role). */}}
{{- define "slipstream.ingress" -}}
{{- $root := index . 0 }}
{{- $role := index . 1 }}
{{- range $from, $targets := fromYaml (include "slipstream.links" $root) }}
{{- $reaches := merge (dict "redis" (list 6379)) $targets }}
{{- if hasKey $reaches $role }}
- from:
    - {{- include "slipstream.peer" (list $root $from) | nindent 6 }}
  {{- with index $reaches $role }}
  ports:
    {{- range . }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
  {{- end }}
{{- end }}
{{- end }}
{{- if and $root.Values.networkPolicy.metricsFrom (not (has $role (list "redis" "audit"))) }}
- from: {{- toYaml $root.Values.networkPolicy.metricsFrom | nindent 4 }}
  ports:
    - {protocol: TCP, port: 9400}
{{- end }}
{{- end }}

{{/* Where it may go: (list root role). */}}
{{- define "slipstream.egress" -}}
{{- $root := index . 0 }}
{{- $role := index . 1 }}
{{- $policy := $root.Values.networkPolicy }}
{{- if ne $role "redis" }}
- ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- if $root.Values.redis.enabled }}
- to:
    - {{- include "slipstream.peer" (list $root "redis") | nindent 6 }}
  ports:
    - {protocol: TCP, port: 6379}
{{- else }}
- ports:
    - {protocol: TCP, port: {{ include "slipstream.redisPort" $root }}}
{{- end }}
{{- range $target, $ports := index (fromYaml (include "slipstream.links" $root)) $role }}
- to:
    - {{- include "slipstream.peer" (list $root $target) | nindent 6 }}
  {{- with $ports }}
  ports:
    {{- range . }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
  {{- end }}
{{- end }}
{{- with index (dict "rollout" $policy.fetchTo "learner" $policy.fetchTo "reward" $policy.judgesTo) $role }}
- to: {{- toYaml . | nindent 4 }}
{{- end }}
{{- end }}
{{- end }}
