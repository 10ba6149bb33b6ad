"""Secrets in lines of shell: many forms are found, and ordinary lines raise no alarm."""

from __future__ import annotations

import base64
import random

import pytest

from launch.credentials import secret_in
from launch.environment import Environment, check_variables
from samestep.errors import ConfigError

# {} is a word that nobody could tell from other words by its form.
PLACES = (
    "export FOO_TOKEN={}",
    'FOO_KEY="{}"',
    "FOO_KEY='{} with spaces'",
    "export A=1 MY_SECRET={} B=2",
    "declare -x DB_PASSWORD={}",
    "export PGPASSWORD={}",
    "MYSQL_PWD={} mysql -u me db",
    "export SMTP_PASS='{}'",
    "apikey={}",
    "export SERVICE_CREDENTIALS={}",
    "cd /x && HF_TOKEN={} hf download a/b",
    "if true; then export WANDB_API_KEY={}; fi",
    "(export GPG_PASSPHRASE={})",
    "curl -u me:{} https://host/x",
    "curl -ume:{} https://host/x",
    "curl --user me:{} https://host/x",
    "curl --proxy-user=me:{} https://host/x",
    "curl -H 'Authorization: Bearer {}' https://host",
    'curl -H "Authorization: Basic {}" https://host',
    'curl --header "X-Api-Key: {}" https://host',
    'curl -H "PRIVATE-TOKEN: {}" https://host',
    'wget --header="Authorization: token {}" https://host',
    "wget --http-password={} https://host",
    "wget --user me --password '{}' https://host",
    "curl 'https://host/x?X-Amz-Signature={}'",
    "curl 'https://host/x?a=1&sig={}'",
    "curl https://me:{}@host/x",
    "git clone https://{}@github.com/a/b",
    "git clone https://oauth2:{}@gitlab.com/a/b.git",
    "pip install --extra-index-url https://me:{}@pypi.example.com/simple x",
    "export https_proxy=http://me:{}@proxy:3128",
    'git config --global http.extraheader "AUTHORIZATION: basic {}"',
    "echo 'machine host login me password {}' > ~/.netrc",
    "aws configure set aws_secret_access_key {}",
    "echo aws_secret_access_key={} >> ~/.aws/credentials",
    "hf auth login --token {}",
    "huggingface-cli login --token={}",
    "wandb login {}",
    "python -c 'import wandb; wandb.login(key=\"{}\")'",
    "sshpass -p {} ssh host",
    "docker login -u me -p {} registry",
    "docker login --username me --password {} registry",
    "mysql -p{} db",
    "kubectl create secret generic x --from-literal=key={}",
    "echo {} | docker login -u me --password-stdin registry",
    "npm config set //registry.npmjs.org/:_authToken={}",
    'echo \'{{"password": "{}"}}\' > x.json',
    "tool --api-key {}",
    "tool --client-secret={}",
    "export FOO_AUTH={}",
    "export ACCESS_KEY={} SIGNING_JWT=$JWT",
    "export HF_TOKEN=${{HF_TOKEN:-{}}}",
    ": ${{HF_TOKEN:={}}}",
    "tool ${{HF_TOKEN-{}}}",
    'export HF_TOKEN="${{MY_TOKEN:-${{OTHER:-{}}}}}"',
    "curl -u me:${{PASSWORD:-{}}} https://host",
    "curl ${{AUTH:+--user me:{}}} https://host",
    "T=$(curl -u me:{} https://host/t)",
    "X=`curl -H 'Authorization: Bearer {}' https://host`",
    "export VAULT=$(vault login -token={})",
    "A=$(AWS_SECRET_ACCESS_KEY={} aws s3 ls)",
    "A=$(echo $(echo $(curl -u me:{} https://host)))",
    "A=$(date) T=$(echo $(cat x) | tool --token {} ${{B:-$(cat y)}})",
    "diff <(curl -u me:{} https://host) y",
    "tool < input.txt --password {} > output.txt",
    "curl -b session={} https://host",
    "podman login -u me -p {} registry",
)
# Keys of known forms are found anywhere.
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
FORMS = ("AKIA{:.16}", "ASIA{:.16}", "hf_{:.34}", "ghp_{:.36}", "github_pat_{:.40}", "glpat-{:.20}")
FORMS += ("sk-{:.40}", "xoxb-{:.20}", "AIza{:.35}", "npm_{:.36}", "pypi-{:.40}", "wandb_v1_{:.40}")
ANYWHERE = (
    "echo {} > x",
    "tool {}",
    "export X={}",
    "cat <<< '{}'",
    "tool --flag={}",
    "a; b | c {}",
    "X=$(printf {})",
    "X=`printf {}`",
    "export X=${{X:-{}}}",
    "tool <(echo {})",
)
COMMIT = "3f786850e387550fdab836ed7e6dc881de23001b"  # a key of W&B looks the same
ORDINARY = (
    f"pip install git+https://github.com/wandb/wandb@{COMMIT}",
    f"git checkout {COMMIT} # wandb fix",
    "export SIGNATURE_VERSION=s3v4 SORT_KEY=${SORT_KEY:-step}; cosign verify --signature x.sig",
    "curl -b cookies.txt -c cookies.txt https://host/x",
    "AUTH=basic",
    "export AUTH_METHODS=basic PROXY_AUTH=Negotiate",
    "ssh login -p 2222",
    "ssh -p 2222 login.example.com docker ps",
    "pip install sk-dist-some-very-long-package-name==1",
    "SORT_KEY=name PRIMARY_KEY=step.loss CACHE_KEY='uv lock'",
    "MASTER_KEY_ID=alias/aws KMS_KEY_ID=1234abcd-12ab-34cd-56ef-1234567890ab",
    "docker build --secret id=hf,src=token.txt .",
    "openssl enc -d -pass file:pass.bin -in x.enc",
    "export HF_TOKEN=$(sed -n 's/^HF_TOKEN=\\(.*\\)/\\1/p' ~/.env)",
    "export HF_TOKEN=$(grep HF_TOKEN= ~/.env | cut -d= -f2)",
    "export HF_TOKEN=$(awk '{print $1}' ~/.hf) A=${HF_TOKEN:?set HF_TOKEN first}",
    "export MASTER_PORT=$((10000 + ${SLURM_JOB_ID:-0} % 10000)) KEY_FILE=${KEY_FILE:-~/.key}",
    "tool ${HF_TOKEN:+--token $HF_TOKEN} ${PASSWORD:-} ${SECRET:-$(cat ~/.secret)}",
    'curl -H "Authorization: Bearer <YOUR TOKEN>" https://host < body.json',
    'T=$(curl -X PUT http://h/latest/api/token -H "X-aws-ec2-metadata-token-ttl-seconds: 60")',
    'set -- a && HF_TOKEN="$1" tool --token "${1:-$2}" --password="$@"',
    "export WANDB_API_KEY=$(cat ~/.wandb_key) HF_TOKEN=`cat ~/.hf` A_TOKEN=",
    'export WANDB_API_KEY="$KEY_OF_MINE"',
    'export HF_TOKEN="${MY_TOKEN:-}"',
    "export API_KEY=$(gcloud secrets versions access latest --secret=wandb)",
    'curl -H "Authorization: Bearer $TOKEN" https://host/x',
    'curl -H "Authorization: Bearer $(cat ~/.token)" https://host/x',
    "curl -H 'Metadata-Flavor: Google' -H 'Accept: application/json' http://169.254.169.254/x",
    'curl -u "me:$PASSWORD" https://host/x',
    "curl -u me https://host/x",
    "curl -LsSf -o /tmp/x https://host/x.tar.gz?version=2&page=1",
    "docker login -u me --password-stdin < ~/.password",
    "echo $PASSWORD | docker login -u me --password-stdin",
    "kubectl create secret generic x --from-literal=key=$KEY",
    "docker run -p 8080:80 --name web nginx",
    "mkdir -p /scratch/$USER/cache",
    "ssh -p 2222 me@host",
    "git clone https://github.com/a/b && git checkout 3f786850e387550fdab836ed7e6dc881de23001b",
    "git clone git@github.com:a/b.git",
    "git clone https://$TOKEN@github.com/a/b",
    "git clone https://oauth2:${TOKEN}@gitlab.com/a/b.git",
    "pip install git+ssh://git@github.com/a/b git+https://github.com/a/b@main",
    "pip install -r requirements.txt --index-url https://pypi.example.com/simple",
    "pip install 'torch==2.9.0' --extra-index-url https://download.pytorch.org/whl/cu128",
    "pip install x --hash=sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae",
    "python tokenize.py --max-tokens 4096 --pad-token '[PAD]' --tokenizer bert",
    "export TOKENIZERS_PARALLELISM=false PAD_TOKEN=0 SSH_KEY=~/.ssh/id",
    "export HF_HUB_DISABLE_IMPLICIT_TOKEN=1; tool --use-auth-token true",
    "wandb login --verify; source ~/.keys",
    "wandb offline",
    "export WANDB_PROJECT=bert WANDB_MODE=offline WANDB_DIR=/scratch/wandb",
    "sort --key=2 --key 3 x | uniq -c",
    "apptainer pull docker://ubuntu@sha256:0123456789abcdef",
    "export https_proxy=\"http://me:$PROXY_PASSWORD@proxy:3128\" http_proxy=http://proxy:3128",
    "export GOOGLE_APPLICATION_CREDENTIALS=/home/me/key.json",
    "export AWS_SHARED_CREDENTIALS_FILE=~/.aws/credentials AWS_PROFILE=training",
    "export AWS_WEB_IDENTITY_TOKEN_FILE=/var/run/token",
    "module load cuda/12.8 nccl/2.27 && module list",
    "source /opt/intel/oneapi/setvars.sh --force > /dev/null",
    "export LD_LIBRARY_PATH=/opt/lib:$LD_LIBRARY_PATH NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=eth0",
    "export OMP_NUM_THREADS=8; ulimit -n 65536; ulimit -l unlimited",
    "rsync -a --delete /data/wiki/ $TMPDIR/wiki/",
    "tar -xzf /shared/data/wiki.tar.gz -C $TMPDIR",
    "if [ -z \"$HF_TOKEN\" ]; then echo 'HF_TOKEN is not set'; exit 1; fi",
    'test -n "$WANDB_API_KEY" || echo "set WANDB_API_KEY first"',
    "echo 'the password is in ~/.netrc' >&2",
    "chmod 600 ~/.ssh/id_rsa ~/.netrc",
    "ssh-keygen -t ed25519 -f ~/.ssh/id -N ''",
    "openssl rand -hex 32 > ~/run.secret; export SAMESTEP_SECRET_FILE=~/run.secret",
    "python -m http.server --directory /data/public 8000 &",
    "hf auth login --token $HF_TOKEN --add-to-git-credential",
    "kubectl create secret generic wandb --from-file=key=$HOME/.wandb",
    "aws configure set region eu-west-1",
    "aws configure set aws_secret_access_key \"$SECRET\"",
    "gcloud auth application-default login --no-launch-browser",
    "az login --identity",
    "echo $((1 + 2)) | base64",
    "echo aGVsbG8gd29ybGQsIHRoaXMgaXMgdGV4dA== | base64 -d",
    "export PYTHONPATH=/home/me/projects/tokenizers/src:$PYTHONPATH",
    "export KEYBOARD=us MONKEY=george TURKEY=istanbul",
    "cp key.txt tokens.txt secret_sauce.py /tmp",
    "export CUDA_VISIBLE_DEVICES=0,1,2,3 PYTHONHASHSEED=0",
    "conda install -y -c conda-forge gcc=13 && conda clean -ay",
)  # fmt: skip


def word(chance: random.Random, length: int = 12) -> str:
    return "x9" + "".join(chance.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=length))


@pytest.mark.parametrize("place", PLACES)
def test_a_secret_is_found_where_it_is_given(place: str) -> None:
    chance = random.Random(place)
    for _ in range(5):
        secret = word(chance)
        with pytest.raises(ConfigError, match=r"setup: .* looks like a secret") as refusal:
            Environment(setup=("true", place.format(secret)))
        assert secret not in str(refusal.value)


@pytest.mark.parametrize("form", FORMS)
def test_a_key_of_a_known_form_is_found_anywhere(form: str) -> None:
    chance = random.Random(form)
    for place in ANYWHERE:
        key = form.format("".join(chance.choices(ALPHABET, k=40)))
        assert secret_in(place.format(key)), key
        encoded = base64.b64encode(f"{key}\n".encode()).decode()
        assert secret_in(f"echo {encoded} | base64 -d > ~/.key"), key
        with pytest.raises(ConfigError, match=r"variables\.X looks like a secret"):
            check_variables({"X": key})


@pytest.mark.parametrize(
    "line",
    [
        "wandb login {}",
        "wandb login --relogin {}",
        "wandb login --host=https://wandb.example.com {}",
        "wandb login <<< {}",
        "export WANDB_API_KEY={}",
        "export WANDB_API_KEY=${{WANDB_API_KEY:-{}}}",
        "echo {} | wandb login",
        "echo '{}' > ~/.wandb_key",
    ],
)
def test_a_key_of_wandb_is_found_beside_what_takes_it(line: str) -> None:
    assert secret_in(line.format(COMMIT))
    assert secret_in(line.format("$KEY")) is None


@pytest.mark.parametrize("line", ORDINARY)
def test_ordinary_lines_raise_no_alarm(line: str) -> None:
    assert secret_in(line) is None
