use super::*;
use crate::fetch::{Base, Fetched, Memory, Pointer, Read};

#[test]
fn a_detour_reads_memory_by_calls_of_the_kernels_own_code() {
    let reader = |at: u64| [0, 1, 2, 3].map(|size| Gva(at + 0x40 * size));
    let pointer = |offset, memory| Pointer { offset, memory };
    let mut capture = Capture {
        registers: RegisterSet::from_iter([]),
        fetching: Some(Fetching {
            readers: Readers {
                kernel: reader(0xffff_ffff_81a0_0010),
                process: reader(0xffff_ffff_81a0_0000),
                kernel_half: Gva(0xffff_8000_0000_0000),
                process_end: Gva(0x7fff_ffff_f000),
                current: 0x1_fbc0,
                disabled: 0x9b8,
            },
            items: vec![Fetched {
                base: Base::Register(Gpr::Rdi),
                pointers: vec![pointer(8, Memory::Kernel), pointer(0, Memory::Kernel)],
                read: Read::Bytes(4),
            }],
        }),
        ..Capture::default()
    };
    let span = span("0f1f440000");
    let made = |capture: &Capture| {
        let member = Member {
            conditions: &[],
            vetoed: VETOED,
            part: record(capture),
        };
        let recorder = Recorder::new(&span, &RING, &[member]).unwrap();
        let detour = recorder.place(DETOUR).unwrap();
        assert!(detour.escape().is_some());
        text(detour.code(), DETOUR)
    };
    expect![[r#"
        80040000 push rax
        80040001 push rcx
        80040002 push rdx
        80040003 push r11
        80040005 pushfq
        80040006 bt dword ptr [rsp],12h
        8004000b jb 0FFFFFFFF80040126h
        80040011 mov rax,gs:[1FBC0h]
        8004001a cmp dword ptr [rax+9B8h],1
        80040021 ja 0FFFFFFFF80040126h
        80040027 rdtsc
        80040029 shl rdx,20h
        8004002d lea r11,[rax+rdx]
        80040031 mov rax,[0FFFFFFFF80100000h]
        80040039 lea rcx,[rax+1]
        8004003d cmp rcx,[0FFFFFFFF80100040h]
        80040045 ja 0FFFFFFFF80040134h
        8004004b lock cmpxchg [0FFFFFFFF80100000h],rcx
        80040055 jne short 0FFFFFFFF80040039h
        80040057 and eax,3FFh
        8004005c shl eax,6
        8004005f mov [rax-7FEFEFF8h],r11
        80040066 lea r11,[rax-7FEFF000h]
        8004006d mov eax,[rsp]
        80040070 mov [r11+14h],eax
        80040074 mov qword ptr [r11+18h],0
        8004007c mov rax,gs:[1FBC0h]
        80040085 inc dword ptr [rax+9B8h]
        8004008b mov rax,rdi
        8004008e add rax,8
        80040094 mov rdx,800000000000h
        8004009e add rdx,rax
        800400a1 jae 0FFFFFFFF80040143h
        800400a7 cmp rax,0FFFFFFFFFFFFE000h
        800400ad ja 0FFFFFFFF80040143h
        800400b3 call 0FFFFFFFF81A000D0h
        800400b8 test eax,eax
        800400ba jne 0FFFFFFFF80040143h
        800400c0 mov rax,rdx
        800400c3 mov rdx,800000000000h
        800400cd add rdx,rax
        800400d0 jae short 0FFFFFFFF80040143h
        800400d2 cmp rax,0FFFFFFFFFFFFE000h
        800400d8 ja short 0FFFFFFFF80040143h
        800400da call 0FFFFFFFF81A00090h
        800400df test eax,eax
        800400e1 jne short 0FFFFFFFF80040143h
        800400e3 mov [r11+20h],edx
        800400e7 mov rax,gs:[1FBC0h]
        800400f0 dec dword ptr [rax+9B8h]
        800400f6 mov [r11],ecx
        800400f9 mov dword ptr [r11+4],1000009h
        80040101 sub rcx,[0FFFFFFFF80100048h]
        80040109 cmp rcx,1
        8004010d jb short 0FFFFFFFF8004013Fh
        8004010f pop rax
        80040110 xchg al,ah
        80040112 and al,8
        80040114 add al,78h
        80040116 sahf
        80040117 pop r11
        80040119 pop rdx
        8004011a pop rcx
        8004011b pop rax
        8004011c nop [rax+rax]
        80040121 jmp 0FFFFFFFF81234565h
        80040126 pop rax
        80040127 xchg al,ah
        80040129 and al,8
        8004012b add al,78h
        8004012d sahf
        8004012e pop r11
        80040130 pop rdx
        80040131 pop rcx
        80040132 pop rax
        80040133 int3
        80040134 lock inc qword ptr [0FFFFFFFF80100080h]
        8004013d jmp short 0FFFFFFFF8004010Fh
        8004013f out 5Eh,al
        80040141 jmp short 0FFFFFFFF8004010Fh
        80040143 or dword ptr [r11+18h],1
        80040148 jmp short 0FFFFFFFF800400E7h
    "#]]
    .assert_eq(&made(&capture));
    let fetching = capture.fetching.as_mut().unwrap();
    fetching.items[0] = Fetched {
        base: Base::Register(Gpr::Rsi),
        pointers: vec![pointer(0, Memory::Either)],
        read: Read::Text(100),
    };
    expect![[r#"
        80040000 push rax
        80040001 push rcx
        80040002 push rdx
        80040003 push r11
        80040005 push rsi
        80040006 push rdi
        80040007 push r8
        80040009 pushfq
        8004000a bt dword ptr [rsp],12h
        8004000f jb 0FFFFFFFF800401B9h
        80040015 mov rax,gs:[1FBC0h]
        8004001e cmp dword ptr [rax+9B8h],1
        80040025 ja 0FFFFFFFF800401B9h
        8004002b rdtsc
        8004002d shl rdx,20h
        80040031 lea r11,[rax+rdx]
        80040035 mov rax,[0FFFFFFFF80100000h]
        8004003d lea rcx,[rax+3]
        80040041 cmp rcx,[0FFFFFFFF80100040h]
        80040049 ja 0FFFFFFFF800401CBh
        8004004f lock cmpxchg [0FFFFFFFF80100000h],rcx
        80040059 jne short 0FFFFFFFF8004003Dh
        8004005b and eax,3FFh
        80040060 shl eax,6
        80040063 mov [rax-7FEFEFF8h],r11
        8004006a lea r11,[rax-7FEFF000h]
        80040071 mov eax,[rsp]
        80040074 mov [r11+14h],eax
        80040078 mov qword ptr [r11+18h],0
        80040080 mov rax,gs:[1FBC0h]
        80040089 inc dword ptr [rax+9B8h]
        8004008f mov rax,[rsp+18h]
        80040094 mov rdx,800000000000h
        8004009e add rdx,rax
        800400a1 jae short 0FFFFFFFF80040108h
        800400a3 cmp rax,0FFFFFFFFFFFFE000h
        800400a9 ja short 0FFFFFFFF80040108h
        800400ab mov rsi,rax
        800400ae lea rdi,[r11+20h]
        800400b2 mov r8d,0Dh
        800400b8 mov rax,rsi
        800400bb call 0FFFFFFFF81A000D0h
        800400c0 test eax,eax
        800400c2 jne 0FFFFFFFF800401DAh
        800400c8 mov [rdi],rdx
        800400cb mov rax,0FEFEFEFEFEFEFEFFh
        800400d5 add rax,rdx
        800400d8 not rdx
        800400db and rdx,rax
        800400de mov rax,8080808080808080h
        800400e8 test rdx,rax
        800400eb jne short 0FFFFFFFF80040106h
        800400ed add rsi,8
        800400f1 add rdi,8
        800400f5 test edi,38h
        800400fb jne short 0FFFFFFFF80040101h
        800400fd add rdi,8
        80040101 dec r8d
        80040104 jne short 0FFFFFFFF800400B8h
        80040106 jmp short 0FFFFFFFF80040176h
        80040108 mov rdx,7FFFFFFFF000h
        80040112 cmp rax,rdx
        80040115 jae 0FFFFFFFF80040254h
        8004011b mov rsi,rax
        8004011e lea rdi,[r11+20h]
        80040122 mov r8d,0Dh
        80040128 mov rax,rsi
        8004012b call 0FFFFFFFF81A000C0h
        80040130 test eax,eax
        80040132 jne 0FFFFFFFF80040217h
        80040138 mov [rdi],rdx
        8004013b mov rax,0FEFEFEFEFEFEFEFFh
        80040145 add rax,rdx
        80040148 not rdx
        8004014b and rdx,rax
        8004014e mov rax,8080808080808080h
        80040158 test rdx,rax
        8004015b jne short 0FFFFFFFF80040176h
        8004015d add rsi,8
        80040161 add rdi,8
        80040165 test edi,38h
        8004016b jne short 0FFFFFFFF80040171h
        8004016d add rdi,8
        80040171 dec r8d
        80040174 jne short 0FFFFFFFF80040128h
        80040176 mov rax,gs:[1FBC0h]
        8004017f dec dword ptr [rax+9B8h]
        80040185 mov [r11],ecx
        80040188 mov dword ptr [r11+4],3000009h
        80040190 sub rcx,[0FFFFFFFF80100048h]
        80040198 cmp rcx,3
        8004019c jb short 0FFFFFFFF800401D6h
        8004019e pop rax
        8004019f xchg al,ah
        800401a1 and al,8
        800401a3 add al,78h
        800401a5 sahf
        800401a6 pop r8
        800401a8 pop rdi
        800401a9 pop rsi
        800401aa pop r11
        800401ac pop rdx
        800401ad pop rcx
        800401ae pop rax
        800401af nop [rax+rax]
        800401b4 jmp 0FFFFFFFF81234565h
        800401b9 pop rax
        800401ba xchg al,ah
        800401bc and al,8
        800401be add al,78h
        800401c0 sahf
        800401c1 pop r8
        800401c3 pop rdi
        800401c4 pop rsi
        800401c5 pop r11
        800401c7 pop rdx
        800401c8 pop rcx
        800401c9 pop rax
        800401ca int3
        800401cb lock inc qword ptr [0FFFFFFFF80100080h]
        800401d4 jmp short 0FFFFFFFF8004019Eh
        800401d6 out 5Eh,al
        800401d8 jmp short 0FFFFFFFF8004019Eh
        800401da mov rax,rsi
        800401dd call 0FFFFFFFF81A00010h
        800401e2 test eax,eax
        800401e4 jne short 0FFFFFFFF80040203h
        800401e6 mov [rdi],dl
        800401e8 test dl,dl
        800401ea je 0FFFFFFFF80040106h
        800401f0 inc rsi
        800401f3 inc rdi
        800401f6 test edi,7
        800401fc jne short 0FFFFFFFF800401DAh
        800401fe jmp 0FFFFFFFF800400F5h
        80040203 lea rax,[r11+94h]
        8004020a cmp rdi,rax
        8004020d jb short 0FFFFFFFF80040254h
        8004020f mov byte ptr [rdi],1
        80040212 jmp 0FFFFFFFF80040106h
        80040217 mov rax,rsi
        8004021a call 0FFFFFFFF81A00000h
        8004021f test eax,eax
        80040221 jne short 0FFFFFFFF80040240h
        80040223 mov [rdi],dl
        80040225 test dl,dl
        80040227 je 0FFFFFFFF80040176h
        8004022d inc rsi
        80040230 inc rdi
        80040233 test edi,7
        80040239 jne short 0FFFFFFFF80040217h
        8004023b jmp 0FFFFFFFF80040165h
        80040240 lea rax,[r11+94h]
        80040247 cmp rdi,rax
        8004024a jb short 0FFFFFFFF80040254h
        8004024c mov byte ptr [rdi],1
        8004024f jmp 0FFFFFFFF80040176h
        80040254 or dword ptr [r11+18h],1
        80040259 jmp 0FFFFFFFF80040176h
    "#]]
    .assert_eq(&made(&capture));
}
