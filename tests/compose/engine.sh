# A Docker engine for the compose test where none runs: installed, started, given its base images, and taken away again.
# Sourced by `run`. Everything it makes lies under $WORK, but for Debian's packages and the tarball under $CACHE.

PACKAGES="docker.io containerd runc iptables debootstrap"
CHAINS="DOCKER DOCKER-ISOLATION-STAGE-1 DOCKER-ISOLATION-STAGE-2 DOCKER-USER DOCKER-FORWARD DOCKER-BRIDGE DOCKER-CT"
DAEMON=""

engine_answers() { docker info >/dev/null 2>&1; }

# Whether an engine can be had; else says why not.
engine_possible() {
  engine_answers && return
  [ "$(id -u)" = 0 ] || { echo "no Docker engine answers, and starting one needs root"; return 1; }
  command -v dockerd >/dev/null || command -v apt-get >/dev/null ||
    { echo "no Docker engine answers, and this is no Debian to install one on"; return 1; }
  [ "$(df --output=avail -m "$TMP" | tail -1)" -gt 12000 ] || { echo "$TMP has less than 12 GB free"; return 1; }
}

engine_start() {
  engine_answers && { echo "an engine runs already"; return; }
  local package
  for package in $PACKAGES; do
    dpkg -s "$package" >/dev/null 2>&1 && continue
    apt-get update -qq
    # shellcheck disable=SC2086
    apt-get install -y -qq --no-install-recommends $PACKAGES >/dev/null
    break
  done
  FORWARD=$(iptables -S FORWARD | sed -n 's/^-P FORWARD //p')
  IP_FORWARD=$(cat /proc/sys/net/ipv4/ip_forward)
  export DOCKER_HOST="unix://$WORK/docker.sock"
  dockerd --data-root "$WORK/data" --exec-root "$WORK/exec" --pidfile "$WORK/dockerd.pid" \
    -H "$DOCKER_HOST" >"$WORK/dockerd.log" 2>&1 &
  DAEMON=$!
  until_true 60 "answer of dockerd" engine_answers
  iptables -P FORWARD "$FORWARD" # its DROP would cut off whoever else forwards packets on this machine
}

# Stop the daemon that we started, by its own id, and remove what it leaves in the kernel.
engine_stop() {
  [ -n "$DAEMON" ] || return 0
  kill "$DAEMON" 2>/dev/null || true
  wait "$DAEMON" 2>/dev/null || true
  local table chain
  for table in filter nat; do
    for chain in $CHAINS; do
      iptables -t $table -S 2>/dev/null | grep -- "-j $chain\b" | sed 's/^-A/-D/' |
        while read -r rule; do eval "iptables -t $table $rule" || true; done
    done
    for chain in $CHAINS; do iptables -t $table -F "$chain" 2>/dev/null || true; done
    for chain in $CHAINS; do iptables -t $table -X "$chain" 2>/dev/null || true; done
  done
  iptables -t nat -S POSTROUTING | grep -- '-s 172\.17\.0\.0/16 ! -o docker0' | sed 's/^-A/-D/' |
    while read -r rule; do eval "iptables -t nat $rule" || true; done
  iptables -S FORWARD | grep -- 'docker0' | sed 's/^-A/-D/' |
    while read -r rule; do eval "iptables $rule" || true; done
  iptables -P FORWARD "$FORWARD"
  ip link del docker0 2>/dev/null || true
  echo "$IP_FORWARD" >/proc/sys/net/ipv4/ip_forward
}

# The images that the Dockerfile and compose.yaml name: pulled, or where no registry answers stood in for by Debian's.
base_images() {
  local image missing=""
  for image in "$PYTHON_IMAGE" "$REDIS_IMAGE" "$PROMETHEUS_IMAGE"; do
    docker image inspect "$image" >/dev/null 2>&1 || missing="$missing $image"
  done
  [ -n "$missing" ] || return 0
  for image in $missing; do timeout 300 docker pull -q "$image" 2>/dev/null || break; missing=${missing# "$image"}; done
  [ -n "$missing" ] || return 0
  echo "no registry answers: $PYTHON_IMAGE and the images on it are made here from Debian's packages"
  bootstrap
  docker build -q -t "$REDIS_IMAGE" - >/dev/null <<END
FROM $PYTHON_IMAGE
RUN apt-get update && apt-get install -y --no-install-recommends redis-server && mkdir -p /data && chown redis /data
END
  docker build -q -t "$PROMETHEUS_IMAGE" - >/dev/null <<END
FROM $PYTHON_IMAGE
RUN apt-get update && apt-get install -y --no-install-recommends prometheus \
 && mkdir -p /prometheus /etc/prometheus/rules && chown nobody /prometheus
USER nobody
ENTRYPOINT ["/usr/bin/prometheus"]
END
}

# Debian's minimal system with Python, as the tag that the Dockerfile names. The certificates that this host trusts and
# the wheels that its pip finds on disk go into this local image alone.
bootstrap() {
  mkdir -p "$CACHE"
  if [ ! -s "$CACHE/base.tar" ]; then
    debootstrap --variant=minbase \
      --include=ca-certificates,python3,python3-dev,python3-pip,python3-venv bookworm "$WORK/rootfs" >"$WORK/debootstrap.log"
    rm -rf "$WORK"/rootfs/var/cache/apt/archives/*.deb
    tar -C "$WORK/rootfs" -c . >"$CACHE/base.tar.part"
    mv "$CACHE/base.tar.part" "$CACHE/base.tar"
    rm -rf "$WORK/rootfs"
  fi
  local bundle=/etc/ssl/certs/ca-certificates.crt wheels=/opt/wheels
  mkdir -p "$WORK/base/wheels"
  cp "$bundle" "$WORK/base/ca.crt"
  [ -d "${PIP_FIND_LINKS:-}" ] && cp "$PIP_FIND_LINKS"/torch-*.whl "$WORK/base/wheels/" 2>/dev/null
  docker import -c 'CMD ["python3"]' "$CACHE/base.tar" slipstream-test-bookworm >/dev/null
  cat >"$WORK/base/Dockerfile" <<END
FROM slipstream-test-bookworm
COPY ca.crt $bundle
COPY wheels $wheels
ENV PIP_CERT=$bundle SSL_CERT_FILE=$bundle REQUESTS_CA_BUNDLE=$bundle PIP_FIND_LINKS=$wheels PIP_DEFAULT_TIMEOUT=180
END
  docker build -q -t "$PYTHON_IMAGE" "$WORK/base" >/dev/null
}
