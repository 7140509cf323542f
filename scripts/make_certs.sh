#!/usr/bin/env bash
# Makes certificates for mutual TLS: scripts/make_certs.sh DIR [--learners=N] HOST_OF_THE_SYNCER... (names or
# addresses). --tls takes DIR/syncer on the syncer's machine and DIR/learner on the learners', or with --learners
# DIR/learner-0 and so on, each for one learner alone; DIR/authority stays at home.
set -euo pipefail
umask 077

refuse() {
  echo "error: $1" >&2
  exit 2
}

learners= words=()
for word in "$@"; do
  if [[ $word =~ ^--learners=([1-9][0-9]*)$ ]]; then
    learners=${BASH_REMATCH[1]}
  elif [[ $word == -* ]]; then
    refuse "$word: the only flag is --learners=N, from 1"
  else
    words+=("$word")
  fi
done
[ ${#words[@]} -ge 2 ] || refuse "name a folder for the certificates, then every name or address of the syncer"
folder=${words[0]}
[ ! -e "$folder/authority" ] || refuse "$folder/authority is there already"

names=()
for host in "${words[@]:1}"; do
  if [[ $host =~ ^[0-9.]+$ || $host == *:* ]]; then names+=("IP:$host"); else names+=("DNS:$host"); fi
done
subject_names=$(IFS=,; echo "${names[*]}")

mkdir -p "$folder/authority"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj "/CN=ddiloco authority" \
  -keyout "$folder/authority/key.pem" -out "$folder/authority/cert.pem" 2>/dev/null

make() {
  local role=$1 extensions=$2
  mkdir -p "$folder/$role"
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=ddiloco ${role/-/ }" \
    -keyout "$folder/$role/key.pem" -out "$folder/$role/request.pem" 2>/dev/null
  openssl x509 -req -in "$folder/$role/request.pem" -days 825 -CAcreateserial \
    -CA "$folder/authority/cert.pem" -CAkey "$folder/authority/key.pem" \
    -extfile <(echo "$extensions") -out "$folder/$role/cert.pem" 2>/dev/null
  cp "$folder/authority/cert.pem" "$folder/$role/ca.pem"
  rm "$folder/$role/request.pem"
}

make syncer $'extendedKeyUsage=serverAuth\nsubjectAltName='"$subject_names"
extensions=$'extendedKeyUsage=clientAuth,serverAuth\nsubjectAltName=DNS:ddiloco-learner'  # they serve each other
if [ -z "$learners" ]; then
  make learner "$extensions"
else
  for ((m = 0; m < learners; m++)); do make "learner-$m" "$extensions"; done
fi
echo "$folder/syncer $folder/learner${learners:+-NUMBER}"
