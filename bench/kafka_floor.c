/* The least that a server of synced producers does: receive, write, fdatasync, answer. Nothing is looked at but sizes.

   kafka_floor DIRECTORY

   It prints its port, and serves until its standard input ends. All requests that are there when a sync ends share the next
   one: one thread receives and answers, another one writes and syncs. What bench/kafka_load.c reaches against it is what the
   machine has room for: system calls, loopback, disk. bench/kafka.py compiles and runs it. */
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define MOST 4096
#define ANSWER_BYTES 56 /* as one to Produce with a short name */

typedef struct {
    unsigned char *data;
    size_t size;
    int *sockets; /* one for each request, in the order in which they came */
    int count;
} Group;

static Group groups[2];
static int gathering, is_due, is_syncing, file, synced;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t begun = PTHREAD_COND_INITIALIZER;

static void *write_and_sync(void *unused) {
    (void)unused;
    for (;;) {
        pthread_mutex_lock(&guard);
        while (!is_due)
            pthread_cond_wait(&begun, &guard);
        is_due = 0;
        pthread_mutex_unlock(&guard);
        Group *group = &groups[!gathering];
        uint64_t one = 1;
        if (write(file, group->data, group->size) != (ssize_t)group->size || fdatasync(file) < 0)
            exit(1);
        if (write(synced, &one, sizeof one) < 0)
            exit(1);
    }
}

static void sync_what_gathered(void) {
    if (is_syncing || groups[gathering].count == 0)
        return;
    gathering = !gathering;
    groups[gathering].size = 0;
    groups[gathering].count = 0;
    is_syncing = 1;
    pthread_mutex_lock(&guard);
    is_due = 1;
    pthread_cond_signal(&begun);
    pthread_mutex_unlock(&guard);
}

/* One send for all answers of a connection that come after each other. */
static void answer(const Group *group) {
    static char out[ANSWER_BYTES * MOST];
    for (int i = 0; i < group->count;) {
        int first = i;
        for (; i < group->count && group->sockets[i] == group->sockets[first]; i++) {
            uint32_t size = htonl(ANSWER_BYTES - 4);
            memcpy(out + (i - first) * ANSWER_BYTES, &size, 4);
        }
        if (send(group->sockets[first], out, (size_t)(i - first) * ANSWER_BYTES, MSG_NOSIGNAL) < 0)
            continue;
    }
}

typedef struct {
    int socket;
    size_t filled;
    unsigned char received[1 << 16];
} Connection;

/* Takes the whole requests out of what a connection has. */
static void take(Connection *connection) {
    Group *group = &groups[gathering];
    size_t at = 0;
    while (connection->filled - at >= 4 && group->count < MOST) {
        uint32_t size;
        memcpy(&size, connection->received + at, 4);
        size = ntohl(size);
        if (connection->filled - at - 4 < size)
            break;
        memcpy(group->data + group->size, connection->received + at + 4, size);
        group->size += size;
        group->sockets[group->count++] = connection->socket;
        at += 4 + size;
    }
    memmove(connection->received, connection->received + at, connection->filled - at);
    connection->filled -= at;
}

int main(int count, char **arguments) {
    char path[4096];
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0), poll = epoll_create1(0);
    pthread_t thread;
    if (count != 2)
        return 2;
    snprintf(path, sizeof path, "%s/floor", arguments[1]);
    file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    synced = eventfd(0, 0);
    if (file < 0 || synced < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) < 0 ||
        listen(listener, 1024) < 0 || getsockname(listener, (struct sockaddr *)&address, &length) < 0)
        return 1;
    for (int i = 0; i < 2; i++) {
        groups[i].data = malloc((size_t)MOST << 12);
        groups[i].sockets = malloc(MOST * sizeof(int));
    }
    pthread_create(&thread, NULL, write_and_sync, NULL);
    int watched[] = {STDIN_FILENO, listener, synced};
    for (int i = 0; i < 3; i++) {
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &watched[i]};
        if (epoll_ctl(poll, EPOLL_CTL_ADD, watched[i], &event) < 0)
            return 1;
    }
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    for (;;) {
        struct epoll_event ready[256];
        int found = epoll_wait(poll, ready, 256, -1);
        for (int i = 0; i < found; i++) {
            if (ready[i].data.ptr == &watched[0])
                return 0;
            if (ready[i].data.ptr == &watched[1]) {
                Connection *made = calloc(1, sizeof *made);
                made->socket = accept(listener, NULL, NULL);
                setsockopt(made->socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                struct epoll_event event = {.events = EPOLLIN, .data.ptr = made};
                epoll_ctl(poll, EPOLL_CTL_ADD, made->socket, &event);
                continue;
            }
            if (ready[i].data.ptr == &watched[2]) {
                uint64_t often;
                if (read(synced, &often, sizeof often) < 0)
                    return 1;
                Group *group = &groups[!gathering];
                Group done = *group;
                is_syncing = 0;
                sync_what_gathered(); /* the disk has work while answers go out */
                answer(&done);
                continue;
            }
            Connection *connection = ready[i].data.ptr;
            ssize_t size = recv(connection->socket, connection->received + connection->filled,
                                sizeof connection->received - connection->filled, 0);
            if (size <= 0) {
                epoll_ctl(poll, EPOLL_CTL_DEL, connection->socket, NULL);
                close(connection->socket);
                continue;
            }
            connection->filled += (size_t)size;
            take(connection);
        }
        sync_what_gathered();
    }
}
