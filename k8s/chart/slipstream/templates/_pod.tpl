{{/* What every pod of a role has in common: (list root role values). */}}

{{- define "slipstream.podMetadata" -}}
{{- $root := index . 0 -}}
labels:
  {{- include "slipstream.labels" (list $root (index . 1)) | nindent 2 }}
annotations:
  # pods start anew when what they read has changed
  checksum/config: {{ include "slipstream.config" $root | sha256sum }}
  checksum/files: {{ toYaml $root.Values.files | sha256sum }}
  {{- with (index . 2).podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "slipstream.placement" -}}
{{- $root := index . 0 -}}
{{- $values := index . 2 -}}
serviceAccountName: {{ include "slipstream.serviceAccount" $root }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $values.spread }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "slipstream.selector" (list $root (index . 1)) | nindent 8 }}
{{- end }}
{{- end }}

{{/* The role's environment. A later name wins, so what the user gives comes last. */}}
{{- define "slipstream.env" -}}
{{- $root := index . 0 -}}
{{- $role := index . 1 -}}
{{- $values := index . 2 -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: SLIPSTREAM__RUN__NAME
  value: {{ include "slipstream.runName" $root | quote | quote }} # a name of digits stays a text
- name: SLIPSTREAM__RUN__ROOT
  value: /runs
- name: SLIPSTREAM__REDIS__URL
  value: {{ include "slipstream.redisUrl" $root | quote }}
- name: SLIPSTREAM_REDIS_PASSWORD_FILE
  value: /run/slipstream/redis/password
- name: SLIPSTREAM__NETWORK__HOST
  value: 0.0.0.0
- name: SLIPSTREAM__NETWORK__ADVERTISE
  value: $(POD_IP)
{{- if and $root.Values.keys.existingSecret (ne $role "audit") }}
- name: SLIPSTREAM__NETWORK__KEYS
  value: /run/slipstream/keys
{{- end }}
- name: SLIPSTREAM__NETWORK__METRICS_PORT
  value: "9400"
{{- if has $role (list "reward" "buffer") }}
- name: SLIPSTREAM__NETWORK__PORT
  value: "9401"
{{- end }}
{{- if eq $role "learner" }}
- name: SLIPSTREAM__LEARNER__CHECKPOINT__STOP_SECONDS
  value: {{ $values.stopSeconds | quote }}
- name: SLIPSTREAM__WEIGHTS__PORT
  value: "9402"
{{- end }}
{{- if eq $role "rollout" }}
- name: SLIPSTREAM__SUPERVISOR__DRAIN_SECONDS
  value: {{ $root.Values.drainSeconds | quote }}
{{- end }}
- name: SLIPSTREAM__TELEMETRY__LOG_FORMAT
  value: {{ $root.Values.logFormat }}
- name: SLIPSTREAM__LEARNER__THREADS
  value: {{ $values.threads | quote }}
- name: SLIPSTREAM__ROLLOUT__ENGINE__THREADS
  value: {{ $values.threads | quote }}
- name: OMP_NUM_THREADS
  value: {{ $values.threads | quote }}
{{- with $root.Values.env }}
{{ toYaml . }}
{{- end }}
{{- with $values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The role's one container; what stands in front of `run ROLE` may differ: (list root role values command delay). */}}
{{- define "slipstream.container" -}}
{{- $root := index . 0 -}}
{{- $role := index . 1 -}}
{{- $values := index . 2 -}}
{{- $delay := index . 4 -}}
- name: {{ $role }}
  image: {{ include "slipstream.image" (list $root $values.flavour) }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  {{- with index . 3 }}
  command: {{- toYaml . | nindent 4 }}
  {{- end }}
  args: [run, {{ $role }}, --config, /etc/slipstream/config.yaml, --name, $(POD_NAME){{ if ne $role "learner" }}, --stay{{ end }}]
  workingDir: /work
  env: {{- include "slipstream.env" (list $root $role $values) | nindent 4 }}
  {{- with $root.Values.envFrom }}
  envFrom: {{- toYaml . | nindent 4 }}
  {{- end }}
  ports:
    - {name: metrics, containerPort: 9400}
    {{- if has $role (list "reward" "buffer") }}
    - {name: groups, containerPort: 9401}
    {{- end }}
    {{- if eq $role "learner" }}
    - {name: weights, containerPort: 9402}
    - {name: rendezvous, containerPort: 29500}
    {{- end }}
  # up once its page answers; alive while its event loop turns; ready when it has its links
  startupProbe:
    httpGet: {path: /healthz, port: metrics}
    periodSeconds: 5
    failureThreshold: 240
  livenessProbe:
    httpGet: {path: /healthz, port: metrics}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  readinessProbe:
    httpGet: {path: /readyz, port: metrics}
    periodSeconds: 5
    timeoutSeconds: 5
  {{- if $delay }}
  # those that send to this one drain first
  lifecycle:
    preStop: {exec: {command: [sleep, {{ $delay | quote }}]}}
  {{- end }}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
      {{- if $values.rdma }}
      add: [IPC_LOCK]
      {{- end }}
  resources:
    {{- range $kind := list "requests" "limits" }}
    {{ $kind }}: {{- merge (dict) (index $values.resources $kind) (default (dict) $values.rdma) | toYaml | nindent 6 }}
    {{- end }}
  volumeMounts:
    - {name: config, mountPath: /etc/slipstream, readOnly: true}
    - {name: redis, mountPath: /run/slipstream/redis, readOnly: true}
    {{- if $root.Values.keys.existingSecret }}
    - {name: keys, mountPath: /run/slipstream/keys, readOnly: true}
    {{- end }}
    - {name: work, mountPath: /work, readOnly: true}
    - {name: tmp, mountPath: /tmp}
    {{- if has $role (list "rollout" "learner") }}
    - {name: cache, mountPath: /cache}
    - {name: shm, mountPath: /dev/shm}
    {{- end }}
    {{- if has $role (list "buffer" "learner") }}
    - {name: runs, mountPath: /runs}
    {{- end }}
{{- end }}

{{- define "slipstream.volumes" -}}
{{- $root := index . 0 -}}
{{- $role := index . 1 -}}
{{- $values := index . 2 -}}
{{- $name := include "slipstream.fullname" $root -}}
- name: config
  configMap: {name: {{ $name }}-config}
- name: redis
  secret:
    secretName: {{ include "slipstream.redisSecret" $root }}
    defaultMode: 0440
    items: [{key: {{ $root.Values.redis.secretKey }}, path: password}]
{{- if $root.Values.keys.existingSecret }}
- name: keys
  secret:
    secretName: {{ $root.Values.keys.existingSecret }}
    defaultMode: 0440
    items: [{key: curve.key, path: curve.key}]
{{- end }}
- name: work
  {{- if $root.Values.files }}
  configMap: {name: {{ $name }}-files}
  {{- else }}
  emptyDir: {}
  {{- end }}
- name: tmp
  emptyDir: {}
{{- if has $role (list "rollout" "learner") }}
- name: cache
  {{- if $root.Values.cache.existingClaim }}
  persistentVolumeClaim: {claimName: {{ $root.Values.cache.existingClaim }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ $root.Values.cache.size }}}
  {{- end }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ $values.sharedMemory }}}
{{- end }}
{{- if eq $role "learner" }}
- name: runs
  persistentVolumeClaim: {claimName: {{ default (printf "%s-runs" $name) $values.storage.existingClaim }}}
{{- end }}
{{- end }}

{{/* A pod's spec but for what its kind of workload decides: (list root role values command delay). */}}
{{- define "slipstream.podSpec" -}}
{{- $three := list (index . 0) (index . 1) (index . 2) -}}
{{- include "slipstream.placement" $three }}
# what comes before SIGTERM, the drain itself, and a little for the kubelet
terminationGracePeriodSeconds: {{ add (index . 4) (index . 0).Values.drainSeconds (default 0 (index . 2).stopSeconds) 10 }}
containers:
  {{- include "slipstream.container" . | nindent 2 }}
volumes:
  {{- include "slipstream.volumes" $three | nindent 2 }}
{{- end }}
